"""The engine openvino: admitted, quiet, unreported, and refused in one line where it cannot be."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.trainer.small_teacher import teach, wish, write_corpus, write_teacher
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.shard_folder import verify_shards
from trainer.distill.teacher.admission import LIMIT
from trainer.distill.teacher.audit import audit_limit, audit_windows, open_auditor
from trainer.distill.teacher.openvino_engine import (
    OpenVinoEngine,
    hold_constants,
    import_openvino,
)
from trainer.distill.teacher.scoring import open_teacher
from trainer.distill.teacher.torch_engine import TorchEngine
from trainer.replica.backend import Compute
from trainer.system.errors import DoesNotFitError, InputError

needed = pytest.mark.skipif(  # not `importorskip`: it would import the part that reports
    find_spec("openvino") is None, reason="the extra openvino is not installed"
)
CPU = Compute("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A teacher stored in bf16, as models are published, and its corpus."""
    folder = tmp_path_factory.mktemp("openvino")
    corpus = write_corpus(folder / "texts.jsonl", 12)
    model = write_teacher(folder / "model", corpus)
    file = model / "model.safetensors"
    weights = {k: v.bfloat16() for k, v in safetensors.torch.load_file(file).items()}
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    return model, corpus


@needed
def test_its_scores_are_admitted_and_hold_beside_torch_without_a_word(
    files: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one pass: conversions are dear. A warning of Python is an error in any test."""
    caplog.set_level(logging.INFO)
    done = teach(wish(*files, tmp_path / "logits", engine="openvino"))
    folder = LogitsFolder(tmp_path / "logits")
    teacher = folder.description.teacher
    assert (teacher.engine, teacher.quantization) == ("openvino", "int8")
    assert teacher.kl is not None
    assert 0 < teacher.kl <= LIMIT
    assert {verdict.state for verdict in verify_shards(folder)} == {"whole"}
    assert [each.getMessage() for each in caplog.records if each.levelno > logging.INFO] == []
    assert open_auditor(folder, done.model_dir, done.vocabulary, CPU)[0] == "torch"
    limit = audit_limit("openvino", "torch")
    wanted = folder.description
    other = open_teacher(done.model_dir, done.vocabulary, wanted, CPU, engine="torch")
    found = audit_windows(folder, other, fraction=1, limit=limit)
    assert not found.is_another_teacher
    assert found.as_json()["limit"] == limit > LIMIT
    assert 0 < found.mean_kl < LIMIT


@needed
def test_windows_and_batches_may_have_any_length(files: tuple[Path, Path]) -> None:
    """Its graph is exported once, from an example of two windows of eight tokens."""
    engine = OpenVinoEngine(files[0], "float32", threads=1)
    torchs = TorchEngine(files[0], torch.float32, published=True)
    draw = np.random.default_rng(0)
    for lengths in ((5,), (64, 2, 33), (8, 8), (1, 20), (3,) * 7):
        batch = [draw.integers(engine.vocab_size, size=n, dtype=np.int32) for n in lengths]
        ours, theirs = (
            torch.cat([logits.clone() for logits in each.iterate_logits(batch)]).log_softmax(-1)
            for each in (engine, torchs)
        )
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        assert len(kl) == sum(lengths) - len(lengths)
        assert kl.mean() <= LIMIT


@needed
def test_a_graphs_constants_are_its_own() -> None:
    """The frontend's are torch's memory, which is freed: a processor with bf16 reads them there."""
    openvino = import_openvino(Path("model"))
    bits = np.arange(8, dtype=np.float16)
    shared = openvino.Tensor(bits, [8], openvino.Type.bf16)
    graph = openvino.Model(openvino.op.Constant(shared, shared_memory=True).outputs(), [])
    hold_constants(graph)
    bits[...] = 7
    (held,) = (node for node in graph.get_ordered_ops() if node.get_type_name() == "Constant")
    assert held.get_element_type() == openvino.Type.bf16
    assert held.data.tolist() == list(range(8))


LISTENING = """
import json, sys
heard = []
sys.addaudithook(lambda name, args: heard.append(name) if name.startswith("socket.") else None)
from pathlib import Path
from trainer.distill.teacher.openvino_engine import import_openvino
heard.clear()  # what torch and transformers do is not this package's
import_openvino(Path("model"))
import openvino.frontend.pytorch.fx_decoder, openvino.opset13
told = [name for name, module in sys.modules.items() if "telemetry" in name or ".ovc" in name]
print(json.dumps([heard, [name for name in told if sys.modules[name] is not None]]))
"""


@needed
def test_it_reports_nothing_to_its_makers() -> None:
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], []]


def test_without_the_package_one_line_names_the_extra(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(InputError, match=r"--engine openvino .* pip install 'motley\[openvino\]'$"):
        teach(wish(*files, tmp_path / "logits", engine="openvino"))
    assert not LogitsFolder(tmp_path / "logits").is_described


def test_what_does_not_fit_is_refused_before_it_is_loaded_with_what_does(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.distill.teacher.openvino_engine.free_memory", lambda _: 1 << 20)
    message = r"needs 0\.\d GB .* 0\.0 GB are free; --engine torch --dtype bfloat16 .* fits$"
    with pytest.raises(InputError, match=message):
        teach(wish(*files, tmp_path / "logits", engine="openvino"))


def test_a_gpu_is_refused(files: tuple[Path, Path]) -> None:
    from trainer.distill.teacher.openvino_engine import open_openvino

    with pytest.raises(InputError, match="computes on the CPU"):
        open_openvino(files[0], "float32", Compute("cuda"))


@needed
def test_an_audit_takes_the_folders_engine_where_torch_does_not_fit(
    files: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = teach(wish(*files, tmp_path / "logits"))
    there = done.description.teacher
    told = replace(done.description, teacher=replace(there, engine="openvino", quantization="int8"))
    folder = LogitsFolder(tmp_path / "told")
    folder.write_description(told)
    monkeypatch.setattr("trainer.distill.teacher.torch_engine.available_bytes", lambda _: 0)
    with pytest.raises(DoesNotFitError, match=r"0\.0 GB are free"):
        open_auditor(done.folder, done.model_dir, done.vocabulary, CPU)
    assert open_auditor(folder, done.model_dir, done.vocabulary, CPU)[0] == "openvino"
    assert "cannot find its own errors" in caplog.text
    assert audit_limit("openvino", "openvino") == audit_limit("torch", "torch")
