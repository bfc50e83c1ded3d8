"""A GGUF file is a model: the same weights, config and tokens as the model it was made of."""

from __future__ import annotations

import json
import math
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the launcher-only install has none")

from click.testing import CliRunner
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from launcher.runs.plan_inputs import model_shape
from tests.trainer.gguf_files import write_gguf
from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.distill.trim_tokenizer import trim_tokenizer
from trainer.model.architecture import parse_architecture, read_architecture
from trainer.model.files import resolve_model
from trainer.model.gguf import conversion
from trainer.model.hf_export import encode_values, iter_safetensors
from trainer.model.initialization import random_weights, read_tensor
from trainer.model.safetensors_headers import read_config, read_headers
from trainer.system.errors import InputError, StorageError
from trainer.system.storage import cache_folder
from trainer.system.storage.atomic_folder import Disk

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = ["", "rm -rf 1234567", "  two\n\n\n  lines\t", "naïve 漢字 😀 ½ ٣٤", "DON'T don't x²"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl"))


def as_family(model: Path, **changes: Any) -> Path:
    """Change a model's config.json and draw weights for it."""
    config = {**read_config(model), **changes}
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config["architectures"] = [f"{names[config['model_type']]}ForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    pieces = iter_safetensors(random_weights(config, 5), {"format": "pt"})
    (model / "model.safetensors").write_bytes(b"".join(pieces))
    return model


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(header) for name, header in read_headers(folder).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": False},
        {"model_type": "qwen2", "tie_word_embeddings": False},
        {"model_type": "qwen3", "head_dim": 16},
    ],
    ids=["llama", "llama-biased", "qwen2", "qwen3"],
)
def test_floats_are_the_same_model(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    as_family(model, **changes)
    off = {"ARCH.expert_count": 0, "quantize.imatrix.file": "x"}  # change nothing
    found = resolve_model(str(write_gguf(tmp_path / "m.gguf", model, keys=off)))
    assert read_architecture(found) == read_architecture(model)
    before, after = read_config(model), read_config(found)
    for key in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act"):
        assert after[key] == before[key]
    assert after["eos_token_id"] == before["eos_token_id"]
    expected, actual = weights(model), weights(found)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)
    old, new = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (model, found))
    assert [new.encode(text).ids for text in TEXTS] == [old.encode(text).ids for text in TEXTS]
    assert new.decode(new.encode(TEXTS[3]).ids) == TEXTS[3]


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1])
def test_blocks_are_multiplied_out(model: Path, tmp_path: Path, kind: Kind) -> None:
    as_family(model, model_type="qwen2")
    found = resolve_model(str(write_gguf(tmp_path / "m.gguf", model, kind)))
    dtype = "F16" if kind == Kind.F16 else "BF16"
    assert read_config(found)["dtype"] == {"F16": "float16", "BF16": "bfloat16"}[dtype]
    headers = read_headers(found)
    for name, values in weights(model).items():
        if values.ndim == 2:
            expected = encode_values(dequantize(quantize(values, kind), kind), dtype)
            assert headers[name].dtype == dtype
            begin, end = headers[name].begin, headers[name].end
            assert headers[name].file.read_bytes()[begin:end] == bytes(expected), name


def test_rotary_frequencies_are_scaled_as_in_llama_3(model: Path, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    as_family(model, model_type="llama", head_dim=64, rope_parameters=scaling)
    theta = 500000.0 ** -(np.arange(0, 64, 2) / 64)
    # By hand: long waves are eight times as long, short ones stay, four lie between.
    factors = np.where(2 * np.pi / theta > 8192, 8.0, 1.0).astype(np.float32)
    between = (2 * np.pi / theta > 2048) & (2 * np.pi / theta < 8192)
    smooth = (8192 * theta[between] / (2 * np.pi) - 1) / 3
    factors[between] = 1 / ((1 - smooth) / 8 + smooth)
    file = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": factors})
    assert read_config(resolve_model(str(file)))["rope_parameters"] == scaling
    factors[3] *= 2
    file = write_gguf(tmp_path / "n.gguf", model, tensors={"rope_freqs.weight": factors})
    with pytest.raises(InputError, match=r"n\.gguf: rope_freqs\.weight .* is not converted"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("pre", "steps", "nfc"),
    [
        ("smollm", [{"type": "Digits", "individual_digits": True}], False),
        ("qwen2", [LLAMA3_SPLIT.replace("{1,3}", "")], True),
        ("llama-bpe", [LLAMA3_SPLIT], False),
    ],
)
def test_text_is_cut_as_by_the_publisher(
    model: Path, tmp_path: Path, pre: str, steps: list[Any], nfc: bool
) -> None:
    path = model / "tokenizer.json"
    tree = json.loads(path.read_bytes())
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    cuts = [
        {"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False}
        if isinstance(s, str)
        else s
        for s in steps
    ]
    last = {**level, "use_regex": not isinstance(steps[0], str)}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*cuts, last]}
    tree["normalizer"] = {"type": "NFC"} if nfc else None
    path.write_text(json.dumps(tree))
    found = resolve_model(str(write_gguf(tmp_path / "m.gguf", model, pre=pre)))
    old, new = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (model, found))
    for text in [*TEXTS, *(f"{text} 2024 x\u0301" for text in TEXTS)]:
        assert new.encode(text, add_special_tokens=False).ids == old.encode(text).ids


@pytest.mark.parametrize(
    ("keys", "tensors", "reason"),
    [
        ({"general.architecture": "gemma3"}, {}, "GGUF architecture gemma3 is not converted"),
        ({"general.type": "adapter"}, {}, "of the type 'adapter', not a model"),
        ({"ARCH.rope.dimension_count": 4}, {}, "rope.dimension_count 4 differs"),
        ({"ARCH.rope.scaling.type": "longrope"}, {}, "rope.scaling.type 'longrope' is not"),
        ({"ARCH.embedding_length": None}, {}, "lacks embedding_length"),
        ({"tokenizer.ggml.model": "t5"}, {}, "a tokenizer of the kind 't5' is not"),
        ({"tokenizer.ggml.pre": "tekken"}, {}, "cuts text as 'tekken', which is not supported"),
        ({"tokenizer.ggml.tokens": None}, {}, "contains no usable tokenizer"),
        ({"ARCH.attention.head_count": 0}, {}, "attention.head_count must be a positive integer"),
        ({"ARCH.attention.head_count": 1 << 20}, {}, "num_attention_heads 1048576 is more"),
        ({"ARCH.attention.head_count_kv": [1, 2]}, {}, "head_count_kv differs between layers"),
        ({"ARCH.block_count": (1 << 31) - 1}, {}, "num_hidden_layers 2147483647 is more than"),
        ({"ARCH.block_count": 1 << 31}, {}, "block_count must be a positive integer"),
        ({"ARCH.attention.layer_norm_rms_epsilon": math.nan}, {}, "epsilon must be a number above"),
        ({"ARCH.rope.freq_base": math.inf}, {}, "rope.freq_base must be a number above zero"),
        ({"ARCH.rope.freq_base": -1.0}, {}, "rope.freq_base must be a number above zero"),
        ({"tokenizer.ggml.eos_token_id": (1 << 32) - 1}, {}, "eos_token_id is 4294967295, the"),
        ({"tokenizer.ggml.eot_token_id": 1 << 20}, {}, "eot_token_id is 1048576, the file has"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "blk.0.attn_sinks.weight is"),
        ({}, {"blk.1.attn_q.weight": None}, "blk.1.attn_q.weight is missing"),
        ({}, {"output_norm.weight": np.ones(3, np.float32)}, "output_norm.weight has shape"),
    ],
)
def test_what_would_be_ignored_is_refused(
    model: Path,
    tmp_path: Path,
    cache: Path,
    keys: dict[str, Any],
    tensors: dict[str, Any],
    reason: str,
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, keys=keys, tensors=tensors)
    with pytest.raises(InputError) as caught:
        resolve_model(str(file))
    assert str(caught.value).startswith(f"{file}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_tokenizer_that_is_not_known_comes_from_beside_the_file(
    model: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, keys={"tokenizer.ggml.pre": "other"})
    shutil.copy(model / "tokenizer.json", tmp_path)
    found = resolve_model(str(file))
    old, new = (Tokenizer.from_file(str(at / "tokenizer.json")) for at in (model, found))
    assert [new.encode(text).ids for text in TEXTS] == [old.encode(text).ids for text in TEXTS]
    shutil.rmtree(found)
    tree = json.loads((model / "tokenizer.json").read_bytes())
    first, second = list(tree["model"]["vocab"])[-2:]
    vocab = tree["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "m.gguf").touch()
    shutil.copy(file, tmp_path / "n.gguf")
    with pytest.raises(InputError, match="the tokenizer does not give"):
        resolve_model(str(tmp_path / "n.gguf"))


def test_a_file_is_planned_and_its_tokenizer_is_cut(model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    assert model_shape(str(file), None).parameters == model_shape(str(model), None).parameters
    arguments = ["--data", str(tmp_path / "train.jsonl"), "--size", "280", "-o"]
    for name in (file, model):
        command = [str(name), *arguments, str(tmp_path / f"{name.name}-cut")]
        done = CliRunner().invoke(trim_tokenizer, command)
        assert done.exit_code == 0, done.output
    of_file, of_folder = (
        json.loads((tmp_path / f"{name}-cut" / "tokenizer.json").read_bytes())["model"]["vocab"]
        for name in ("m.gguf", "model")
    )
    assert of_file == of_folder


def test_a_template_for_tools_is_taken(model: Path, tmp_path: Path) -> None:
    keys = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    file = write_gguf(tmp_path / "m.gguf", model, keys={**keys, "tokenizer.chat_templates": ["x"]})
    settings = json.loads((resolve_model(str(file)) / "tokenizer_config.json").read_bytes())
    assert settings["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_one_file_of_a_folder_is_its_model(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = write_gguf(folder / "m.gguf", model)
    found = resolve_model(str(folder))
    assert found == resolve_model(str(file)) == load_trained(file).base_dir
    assert load_trained(file).path == file  # messages name what the user gave
    shutil.copy(file, folder / "n.gguf")
    with pytest.raises(InputError, match="has 2 GGUF files: give one of them"):
        read_config(resolve_model(str(folder)))


@pytest.mark.parametrize("size", [3, 200, -100])
def test_a_cut_file_is_named(model: Path, tmp_path: Path, size: int) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=r"m\.gguf: damaged or truncated GGUF file") as caught:
        resolve_model(str(file))
    assert "\n" not in str(caught.value)


def _resolve(file: str) -> tuple[str, float]:
    found = resolve_model(file)
    return str(found), (found / "manifest.json").stat().st_mtime


@pytest.mark.cluster
def test_two_processes_convert_once(model: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(_resolve, [str(file)] * 2, chunksize=1)
    assert first == second == _resolve(str(file))


def test_a_file_that_is_replaced_while_it_is_converted_leaves_nothing(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)

    def slow(values: np.ndarray, dtype: str) -> Any:
        file.touch()
        return encode_values(values, dtype)

    monkeypatch.setattr(conversion, "encode_values", slow)
    with pytest.raises(InputError, match="was changed, replaced or removed while it was read"):
        resolve_model(str(file))
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_full_disk_leaves_nothing(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model)
    write = Disk.write

    def full(disk: Disk, descriptor: int, data: memoryview) -> int:
        if len(data) > 10_000:
            raise OSError(28, "No space left on device")
        return write(disk, descriptor, data)

    monkeypatch.setattr(Disk, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        resolve_model(str(file))
    assert [path.name for path in cache.iterdir()] == [".lock"]
    monkeypatch.undo()
    monkeypatch.setenv("MOTLEY_CACHE", str(cache))
    assert parse_architecture(read_config(resolve_model(str(file))), "config.json")
    assert cache_folder.cache_root() == cache


@pytest.mark.parametrize("number", [156, int(Kind.Q8_1)])
def test_a_type_that_the_package_lacks_is_no_damage(
    model: Path, tmp_path: Path, number: int
) -> None:
    """156 is IQ3_KS of ik_llama.cpp; Q8_1 is no type of weights, and nothing multiplies it out."""
    file = write_gguf(tmp_path / "m.gguf", model)
    raw = bytearray(file.read_bytes())
    name = b"blk.0.ffn_norm.weight"
    place = raw.index(name) + len(name) + 4 + 8  # the name, the dimensions of a vector
    assert raw[place : place + 4] == bytes(4)  # F32
    raw[place : place + 4] = number.to_bytes(4, "little")
    file.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        resolve_model(str(file))
    assert "the installed gguf package cannot multiply out" in str(caught.value)
    assert ("type 156" if number == 156 else "Q8_1") in str(caught.value)
