"""What is no model that Motley reads is named, and the command that is named makes one of it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trainer.small_model import write_data, write_model
from trainer.checkpoint.adapter import open_adapter
from trainer.checkpoint.adapter_folder import find_adapter
from trainer.config.run import load_config
from trainer.data.encoder import Encoder
from trainer.model.config_keys import list_notices
from trainer.model.files import resolve_model
from trainer.model.formats import find_conversion
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.system.errors import InputError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl"))


def refusal(path: Path) -> str:
    """Return what a run says of a model."""
    settings = load_config(None, {"model.path": str(path), "data.train": "none", "num_classes": 2})
    with pytest.raises(InputError) as caught:
        build_layout(resolve_model(str(path)), settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.long
def test_weights_as_bin_are_converted_by_the_named_command(model: Path) -> None:
    torch = pytest.importorskip("torch", reason="the launcher-only install has none")
    from safetensors.torch import load_file

    before = read_headers(model)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    message = refusal(model)
    assert message.startswith(f"{model}: has its weights as .bin")
    command = message.partition("convert it: ")[2]
    subprocess.run(["sh", "-c", command], check=True, timeout=240, capture_output=True)
    after = read_headers(model.with_name("model-safetensors"))
    assert {name: header.shape for name, header in after.items()} == {
        name: header.shape for name, header in before.items()
    }
    assert (model.with_name("model-safetensors") / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "m.gguf"])
def test_a_pointer_of_git_lfs_is_named(model: Path, name: str) -> None:
    oid = f"oid sha256:{7:064d}"
    path = model / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 2690\n")
    assert refusal(path if name.endswith(".gguf") else model) == (
        f"{path}: a Git LFS pointer, not the file itself; fetch it: git lfs install && git"
        f" -C {model} lfs pull"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pointer_in_place_of_a_tokenizer_is_named(model: Path, name: str) -> None:
    (model / name).write_text("version https://git-lfs.github.com/spec/v1\nsize 2690\n")
    with pytest.raises(InputError, match=f"{name}: a Git LFS pointer"):
        Encoder(model)


def test_a_weights_file_is_not_its_folder(model: Path) -> None:
    file = model / "model.safetensors"
    assert refusal(file) == f"{file}: is a file, a model is a folder: give {model}"


def test_an_adapter_is_to_be_merged(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    adapter = output / "checkpoints" / "best"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Q/x"}))
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    for path in (output, adapter):
        assert f"{path}: is a LoRA adapter of Q/x, not a model; merge it: trainer merge " in (
            refusal(path)
        )
    (adapter / "adapter_config.json").write_text("[]")
    assert "adapter of some model" in refusal(adapter)


def test_a_model_has_no_other_way_in(model: Path, tmp_path: Path) -> None:
    assert find_conversion(model) is None
    assert find_conversion(tmp_path / "none") is None
    (model / "training_args.bin").write_bytes(b"")  # lies beside many a model
    assert find_conversion(model) is None
    shutil.rmtree(model)
    model.mkdir()
    assert "so this is not a Hugging Face model" in refusal(model)


def test_one_file_counts_before_an_index_that_is_left_over(model: Path) -> None:
    before = read_headers(model)
    parts = dict.fromkeys(before, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    assert read_headers(model) == before
    (line,) = (line for line in list_notices(model) if "index" in line)
    assert line == (
        "model.safetensors.index.json and its files are not used: model.safetensors is there, too"
    )
    (model / "model.safetensors").unlink()
    assert "model-00001-of-00001.safetensors: no such file" in refusal(model)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["checkpoint-50/", "checkpoint-500/", "checkpoint-60/"], "give one of them, such as {}"),
        (["zero_to_fp32.py", "global_step5/"], "has its weights as DeepSpeed's parts"),
        (["pytorch_model_fsdp_0/"], "accelerate merge-weights "),
    ],
)
def test_a_folder_of_another_trainer_has_a_way_on(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    output = tmp_path / "output"
    output.mkdir()
    for name in names:
        (output / name).mkdir(parents=True) if name.endswith("/") else (output / name).touch()
    reason = reason.format(output / "checkpoint-500")
    assert reason in refusal(output)
    with pytest.raises(InputError) as caught:
        find_adapter(output)
    assert reason in str(caught.value)


@pytest.mark.long
def test_an_adapter_as_bin_is_converted_by_the_named_command(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the launcher-only install has none")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    rows, width = read_headers(model)["model.layers.0.self_attn.q_proj.weight"].shape
    down = torch.ones(4, width)
    tensors = {f"{layer}.lora_A.weight": down[:2], f"{layer}.lora_B.weight": torch.ones(rows, 2)}
    folder = tmp_path / "it's an adapter"
    folder.mkdir()
    torch.save(tensors, folder / "adapter_model.bin")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2}
    settings["base_model_name_or_path"] = str(model)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError) as caught:
        open_adapter(folder)
    assert "has its weights as adapter_model.bin (pickle)" in str(caught.value)
    command = str(caught.value).partition("convert it: ")[2]
    subprocess.run(["sh", "-c", command], check=True, timeout=240, capture_output=True)
    opened, _ = open_adapter(folder)
    assert [pair.rank for pair in opened.pairs.values()] == [2]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("num_attention_heads", 0, "must be a positive integer, got 0"),
        ("num_hidden_layers", 1 << 31, "2147483648 is more than a model has"),
        ("intermediate_size", 1 << 40, "1099511627776 is more than a model has"),
        ("rms_norm_eps", math.nan, "must be a number above zero, got nan"),
        ("rms_norm_eps", "1e-5", "must be a number above zero"),
    ],
)
def test_absurd_sizes_are_refused_in_a_line(
    model: Path, key: str, value: object, reason: str
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {key: value}))
    assert f"{key} {reason}" in refusal(model)
