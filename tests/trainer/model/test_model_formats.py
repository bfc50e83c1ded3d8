"""What is no model that Motley reads is named, and the command that is named makes one of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trainer.small_model import write_data, write_model
from trainer.config.run import load
from trainer.data.encoder import Encoder
from trainer.model.files import resolve_model
from trainer.model.formats import way_in
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import read_headers
from trainer.system.errors import InputError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", write_data(tmp_path / "train.jsonl"))


def refusal(path: Path) -> str:
    """Return what a run says of a model."""
    settings = load(None, {"model.path": str(path), "data.train": "none", "num_classes": 2})
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
    assert way_in(model) is None
    assert way_in(tmp_path / "none") is None
    (model / "training_args.bin").write_bytes(b"")  # lies beside many a model
    assert way_in(model) is None
    shutil.rmtree(model)
    model.mkdir()
    assert "so this is not a Hugging Face model" in refusal(model)
