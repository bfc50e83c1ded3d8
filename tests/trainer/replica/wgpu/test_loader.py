"""What lies on the device is what the model directory holds, as the torch replica would have it."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.replica.torch.loader import load_model
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import Pool
from trainer.replica.wgpu.weights import loader, nf4_file
from trainer.replica.wgpu.weights.loader import load_frozen, take_frozen

if TYPE_CHECKING:
    from tests.conftest import TinyModel

NF4_FILE = "motley-nf4-float32.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", write_data(tmp_path / "data.jsonl"))


def config_of(model: Path, **settings: Any) -> RunConfig:
    tree: dict[str, Any] = {"num_classes": 3, "data": {"train": "data.jsonl"}}
    if settings.pop("task", "classify") == "causal-lm":
        tree |= {"task": "causal-lm", "num_classes": None}
    return RunConfig.model_validate({**tree, "model": {"path": str(model), **settings}})


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def store(model: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    save_file({name: t.to(dtype) for name, t in tensors.items()}, model / "model.safetensors")


def host(device: Device, array: Array) -> np.ndarray:
    """The fp32 values of an f32 or bf16 array."""
    raw = device.read(array)
    if array.kind == "bf16":
        raw = (raw.view(np.uint16)[: array.size].astype(np.uint32) << 16).view(np.float32)
    return raw.reshape(array.shape)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_dtype_into_every_kind(
    model: Path, device: Device, stored: torch.dtype, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_STEP", 512)  # several pieces a tensor
    store(model, tensors_of(model), stored)
    arrays = load_frozen(model, config_of(model, dtype=dtype), Pool(device))
    source = tensors_of(model)
    assert "score.weight" not in arrays
    for name, array in arrays.items():
        expected = source[name].to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(host(device, array), expected, err_msg=name)
        assert array.kind == ("bf16" if dtype == "bfloat16" and len(array.shape) == 2 else "f32")


def test_shards_and_a_bare_prefix(model: Path, device: Device) -> None:
    source = tensors_of(model)
    (model / "model.safetensors").unlink()
    bare = {name.removeprefix("model."): tensor for name, tensor in source.items()}
    names = sorted(bare)
    weight_map: dict[str, str] = {}
    for shard, chosen in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: bare[name] for name in chosen}, model / shard)
        weight_map |= dict.fromkeys(chosen, shard)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, array in load_frozen(model, config_of(model), Pool(device)).items():
        np.testing.assert_array_equal(host(device, array), source[name].numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_is_that_of_the_torch_replica(
    tiny_model: TinyModel,
    tmp_path: Path,
    device: Device,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model"  # a copy: the NF4 file is kept beside the weights
    shutil.copytree(tiny_model(), model)
    monkeypatch.setattr(nf4_file, "_STEP", 640)
    monkeypatch.setattr(loader, "_STEP", 512)
    config = config_of(model, dtype=dtype, quantization="nf4", task="causal-lm")
    arrays = load_frozen(model, config, Pool(device))
    quantised = {name: array for name, array in arrays.items() if array.kind == "nf4"}
    assert len(quantised) == 14  # seven linears in two layers
    parameters = dict(load_model(model, config, torch.device("cpu")).named_parameters())
    for name, array in quantised.items():
        reference: Any = parameters[name.replace(".weight", ".base_layer.weight")]
        codes = device.read(array).view(np.uint8)
        np.testing.assert_array_equal(codes, reference.data.numpy().reshape(-1), err_msg=name)
        assert array.scales is not None
        np.testing.assert_array_equal(device.read(array.scales), reference.quant_state.absmax)


def test_the_nf4_file_says_what_it_was_made_from(model: Path, device: Device) -> None:
    load_frozen(model, config_of(model, quantization="nf4"), Pool(device))
    with safe_open(model / NF4_FILE, "numpy") as file:
        metadata = file.metadata()
        codes = file.get_tensor("model.layers.1.mlp.up_proj.weight")
        absmax = file.get_tensor("model.layers.1.mlp.up_proj.weight.absmax")
    assert metadata["schema"] == "motley.nf4/1"
    assert metadata["dtype"] == "float32"
    assert codes.shape == (64 * 32 // 2,)
    assert absmax.shape == (64 * 32 // 64,)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def change_the_model(path: Path) -> None:
    flip_last_byte(path.with_name("model.safetensors"))


def read_codes(device: Device, arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: device.read(a).tobytes() for name, a in arrays.items() if a.kind == "nf4"}


@pytest.mark.parametrize("damage", [flip_last_byte, truncate, empty, change_the_model])
def test_a_damaged_or_stale_file_is_made_again(
    model: Path, device: Device, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model, quantization="nf4")
    first = load_frozen(model, config, Pool(device))
    good = (model / NF4_FILE).read_bytes()
    damage(model / NF4_FILE)
    with caplog.at_level(logging.WARNING):
        second = load_frozen(model, config, Pool(device))
    assert "it is rewritten" in caplog.text
    made = (model / NF4_FILE).read_bytes()
    if damage is change_the_model:
        assert made != good
    else:
        assert made == good
        assert read_codes(device, first) == read_codes(device, second)


def test_a_good_file_is_used_again(
    model: Path, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model, quantization="nf4")
    first = load_frozen(model, config, Pool(device))
    before = (model / NF4_FILE).stat()
    with caplog.at_level(logging.INFO):
        second = load_frozen(model, config, Pool(device))
    after = (model / NF4_FILE).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert "quantising" not in caplog.text
    assert read_codes(device, first) == read_codes(device, second)


def test_where_the_model_cannot_be_written_the_users_cache_keeps_it(
    model: Path, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A folder in its place refuses everybody, also root.
    (model / NF4_FILE).mkdir()
    config = config_of(model, quantization="nf4")
    first = load_frozen(model, config, Pool(device))
    (kept,) = (tmp_path / "cache" / "motley").iterdir()
    (model / NF4_FILE).rmdir()
    (model / NF4_FILE).write_bytes(kept.read_bytes())
    assert read_codes(device, load_frozen(model, config, Pool(device))) == read_codes(device, first)
    assert [path.name for path in model.iterdir() if path.name.startswith(".")] == []


def test_where_nothing_can_be_written_it_is_made_for_this_run(
    model: Path, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (model / NF4_FILE).mkdir()
    config = config_of(model, quantization="nf4")
    first = read_codes(device, load_frozen(model, config, Pool(device)))
    (model / NF4_FILE).rmdir()
    assert first == read_codes(device, load_frozen(model, config, Pool(device)))


def test_a_plan_takes_what_loading_takes(model: Path, device: Device) -> None:
    for settings in ({}, {"dtype": "bfloat16"}, {"quantization": "nf4"}):
        config = config_of(model, **settings)
        planned, loaded = Pool(None), Pool(device)
        take_frozen(read_architecture(model), config, planned)
        load_frozen(model, config, loaded)
        assert planned.budget() == loaded.budget()
        assert planned.budget().parts["frozen"] > 0
