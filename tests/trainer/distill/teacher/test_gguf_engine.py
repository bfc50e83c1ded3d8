"""The engine gguf: what llama.cpp computes of a file is what its dequantised weights give."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("gguf", reason="the launcher-only install has none")

import safetensors.numpy
import torch
from gguf import GGMLQuantizationType as Kind

from tests.trainer.gguf_files import write_gguf
from tests.trainer.small_teacher import teach, wish, write_corpus, write_teacher
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.shard_folder import verify_shards
from trainer.distill.teacher import gguf_engine, llama_cpp
from trainer.distill.teacher.admission import LIMIT
from trainer.distill.teacher.assignment import assign_request
from trainer.distill.teacher.audit import open_auditor
from trainer.distill.teacher.gguf_engine import GgufEngine, open_gguf
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.model.architecture import read_architecture
from trainer.model.files import resolve_model
from trainer.model.gguf.source import find_source
from trainer.model.initialization import random_weights
from trainer.model.safetensors_headers import read_config
from trainer.replica.backend import Compute
from trainer.system.errors import InputError, RefusedError

needed = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="the extra gguf-engine is not installed"
)
CPU = Compute("cpu", threads=1)
LENGTHS = (5, 1, 64, 2, 33, 40, 1, 20)
"""Of windows: of one token too, which predicts nothing."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A teacher's folder and its corpus."""
    folder = tmp_path_factory.mktemp("gguf")
    corpus = write_corpus(folder / "texts.jsonl", 12)
    return write_teacher(folder / "model", corpus), corpus


@pytest.fixture
def eights(files: tuple[Path, Path], tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", files[0], Kind.Q8_0)


def family(model: Path, folder: Path, **changes: Any) -> Path:
    """Copy a model as one of another family, whose logits are as far from flat."""
    shutil.copytree(model, folder)
    config = {**read_config(model), **changes}
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config["architectures"] = [f"{names[config['model_type']]}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: np.array(values) for name, values in random_weights(config, 5).items()}
    weights["model.embed_tokens.weight"] *= np.float32(20)
    safetensors.numpy.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def opened(file: Path) -> tuple[Path, GgufEngine]:
    folder = resolve_model(str(file))
    source = find_source(folder)
    assert source is not None
    return folder, GgufEngine(source, threads=1)


def windows(vocab_size: int) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    return [draw.integers(vocab_size, size=length, dtype=np.int32) for length in LENGTHS]


def logits(engine: GgufEngine | TorchEngine, batch: list[np.ndarray]) -> torch.Tensor:
    return torch.cat([rows.clone() for rows in engine.iterate_logits(batch)]).double()


@needed
@pytest.mark.parametrize(
    ("changes", "kind", "most"),
    [
        ({"model_type": "llama"}, Kind.F32, 1e-7),
        ({"model_type": "llama", "tie_word_embeddings": False}, Kind.Q8_0, 5e-3),
        ({"model_type": "qwen2"}, Kind.Q4_1, 5e-3),
        ({"model_type": "qwen3", "head_dim": 16}, Kind.F16, 1e-4),
    ],
    ids=["llama-f32", "llama-q8_0", "qwen2-q4_1", "qwen3-f16"],
)
def test_logits_are_those_of_the_dequantised_weights(
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    kind: Kind,
    most: float,
) -> None:
    """Windows of all lengths, first together, then in parts that continue one another."""
    model = family(files[0], tmp_path / "model", **changes)
    folder, engine = opened(write_gguf(tmp_path / "m.gguf", model, kind))
    batch = windows(engine.vocab_size)
    expected = logits(TorchEngine(folder, torch.float32, published=True), batch).log_softmax(1)
    found = logits(engine, batch)
    assert found.shape == expected.shape == (sum(LENGTHS) - len(LENGTHS), engine.vocab_size)
    divergence = (expected.exp() * (expected - found.log_softmax(1))).sum(1)
    assert divergence.mean() < most
    monkeypatch.setattr(gguf_engine, "gguf_batch", lambda _: 16)
    _, parts = opened(tmp_path / "m.gguf")
    assert [len(rows) for rows in parts.iterate_logits(batch[2:3])] == [16, 16, 16, 15]
    torch.testing.assert_close(logits(parts, batch), found, rtol=0, atol=2e-2)


@needed
def test_a_pass_says_what_computed_and_is_repeated_to_the_byte(
    files: tuple[Path, Path], eights: Path, tmp_path: Path
) -> None:
    wanted = wish(eights, files[1], tmp_path / "logits", engine="gguf")
    done = teach(wanted)
    folder = LogitsFolder(tmp_path / "logits")
    teacher = folder.description.teacher
    assert (teacher.engine, teacher.quantization) == ("gguf", "Q8_0")
    assert teacher.name == str(eights)  # not its folder in a cache
    assert teacher.kl is not None
    assert 0 < teacher.kl < LIMIT
    assert {verdict.state for verdict in verify_shards(folder)} == {"whole"}
    auditor = open_auditor(folder, done.model_dir, done.vocabulary, Compute("cpu"))
    assert auditor[0] == "torch"
    shard = folder.path / folder.description.shards[1].name
    before = (shard / "logits.parquet").read_bytes()
    shutil.rmtree(shard)
    teach(wanted)
    assert (shard / "logits.parquet").read_bytes() == before


@needed
def test_two_engines_or_files_never_fill_one_folder(
    files: tuple[Path, Path], eights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "logits"
    teach(wish(eights, files[1], out, engine="gguf"))
    with pytest.raises(RefusedError, match=r"teacher\.engine is gguf there and torch here"):
        assign_request(wish(eights, files[1], out))
    fours = write_gguf(tmp_path / "four.gguf", files[0], Kind.Q4_1)
    with pytest.raises(RefusedError, match=r"teacher\.(digest|quantization) is"):
        assign_request(wish(fours, files[1], out, engine="gguf"))


def test_types_are_those_of_matrices_the_most_used_first(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    wide = {"token_embd.weight": np.ones((400, 32), np.float16)}
    mixed = write_gguf(tmp_path / "m.gguf", files[0], Kind.Q8_0)
    assert assigned(mixed, files[1], tmp_path) == "Q8_0"
    plain = write_gguf(tmp_path / "n.gguf", files[0], Kind.F32, tensors=wide)
    assert assigned(plain, files[1], tmp_path) == "F32+F16"


def assigned(file: Path, corpus: Path, folder: Path) -> str:
    wanted = wish(file, corpus, folder / "logits", engine="gguf")
    return assign_request(wanted).description.teacher.quantization


def test_a_model_that_is_no_gguf_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--engine gguf: .*/model is not a GGUF file; give one"):
        assign_request(wish(*files, tmp_path / "logits", engine="gguf"))


def test_without_the_package_one_line_names_the_extra(
    files: tuple[Path, Path], eights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    message = r"m\.gguf: --engine gguf needs .* missing: pip install 'motley\[gguf-engine\]'$"
    with pytest.raises(InputError, match=message):
        teach(wish(eights, files[1], tmp_path / "logits", engine="gguf"))
    assert not LogitsFolder(tmp_path / "logits").is_described


@needed
def test_another_version_is_refused(eights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its structures may differ, and a wrong one is read without an error."""
    monkeypatch.setattr(llama_cpp, "VERSION", "2026.1.1")
    with pytest.raises(InputError, match=r"needs xllamacpp 2026\.1\.1, [0-9.]+ is installed: pip"):
        opened(eights)


def test_a_gpu_is_refused(eights: Path) -> None:
    with pytest.raises(InputError, match="computes on the CPU"):
        open_gguf(resolve_model(str(eights)), Compute("cuda"))


def test_what_does_not_fit_is_refused_with_the_figures(
    eights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_engine, "free_memory", lambda _: 1 << 20)
    message = r"m\.gguf needs 0\.\d GB of main memory beside its weights, and 0\.0 GB are free;"
    with pytest.raises(InputError, match=message):
        open_gguf(resolve_model(str(eights)), CPU)


@needed
def test_weights_that_exceed_the_memory_are_read_from_the_disk(
    eights: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `launch plan --distill` plans it, and said."""
    folder = resolve_model(str(eights))
    beside = gguf_engine.needed_memory(read_architecture(folder))
    monkeypatch.setattr(gguf_engine, "free_memory", lambda _: beside)
    assert len(logits(open_gguf(folder, CPU), [np.ones(4, np.int32)])) == 3
    assert "m.gguf: its weights take 0.0 GB, and 0.0 GB of main memory are free" in caplog.text


@needed
def test_a_window_that_does_not_fit_is_an_engines_memory_error(eights: Path) -> None:
    _, engine = opened(eights)
    short, long = np.ones(4, np.int32), np.ones(1 << 20, np.int32)
    assert len(logits(engine, [short])) == 3
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = psutil.Process().memory_info().vms + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        with pytest.raises(MemoryError):
            next(engine.iterate_logits([long]))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert len(logits(engine, [short])) == 3  # smaller batches still do


@needed
@pytest.mark.parametrize("how", ["replaced", "cut", "removed"])
def test_a_file_that_changes_while_it_is_read_ends_the_pass(
    files: tuple[Path, Path], eights: Path, tmp_path: Path, how: str
) -> None:
    folder, engine = opened(eights)
    batch = windows(engine.vocab_size)
    assert next(engine.iterate_logits(batch)).isfinite().all()
    if how == "replaced":
        write_gguf(tmp_path / "n.gguf", files[0], Kind.Q4_1).replace(eights)
    elif how == "cut":  # a copy in its place: the mapped pages are of the old one
        (tmp_path / "n.gguf").write_bytes(eights.read_bytes()[:-100])
        (tmp_path / "n.gguf").replace(eights)
    else:
        eights.unlink()
    message = r"m\.gguf: was changed, replaced or removed while it was read; start again$"
    with pytest.raises(InputError, match=message):
        next(engine.iterate_logits(batch))
    with pytest.raises(InputError, match=message):
        open_gguf(folder, CPU)


@needed
def test_nan_is_refused_before_anything_is_written(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    broken = {"blk.1.ffn_norm.weight": np.full(32, np.nan, np.float32)}
    file = write_gguf(tmp_path / "m.gguf", files[0], Kind.Q8_0, tensors=broken)
    with pytest.raises(RefusedError, match="scored by it is NaN or Inf from transformers'"):
        teach(wish(file, files[1], tmp_path / "logits", engine="gguf"))
    assert not list((tmp_path / "logits").glob("shard-*"))
