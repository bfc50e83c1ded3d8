"""What lies on the device is what the model directory holds, as the torch replica would have it."""

from __future__ import annotations

import json
import logging
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
from trainer.model.files import model_digest
from trainer.replica.torch.loader import load_model
from trainer.replica.weights import nf4_file
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.weights import loader
from trainer.replica.wgpu.weights.loader import load_frozen, take_frozen

if TYPE_CHECKING:
    from tests.conftest import TinyModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    """Return the files that were kept, the newest last."""
    found = cache.glob("*/nf4.safetensors")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


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
    arrays = load_frozen(model, config_of(model, dtype=dtype), MemoryPool(device)).arrays
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
    for name, array in load_frozen(model, config_of(model), MemoryPool(device)).arrays.items():
        np.testing.assert_array_equal(host(device, array), source[name].numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nf4_is_that_of_the_torch_replica(
    tiny_model: TinyModel,
    tmp_path: Path,
    device: Device,
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    monkeypatch.setattr(nf4_file, "_STEP", 640)
    monkeypatch.setattr(loader, "_STEP", 512)
    config = config_of(model, dtype=dtype, quantization="nf4", task="causal-lm")
    arrays = load_frozen(model, config, MemoryPool(device)).arrays
    quantised = {name: array for name, array in arrays.items() if array.kind == "nf4"}
    assert len(quantised) == 14  # seven linears in two layers
    parameters = dict(load_model(model, config, torch.device("cpu")).named_parameters())
    for name, array in quantised.items():
        reference: Any = parameters[name.replace(".weight", ".base_layer.weight")]
        codes = device.read(array).view(np.uint8)
        np.testing.assert_array_equal(codes, reference.data.numpy().reshape(-1), err_msg=name)
        assert array.scales is not None
        np.testing.assert_array_equal(device.read(array.scales), reference.quant_state.absmax)


def test_the_nf4_file_says_what_it_was_made_from(model: Path, device: Device, cache: Path) -> None:
    before = sorted(model.iterdir())
    load_frozen(model, config_of(model, quantization="nf4"), MemoryPool(device))
    assert sorted(model.iterdir()) == before, "the model's folder is the user's"
    (made,) = kept(cache)
    with safe_open(made, "numpy") as file:
        metadata = file.metadata()
        codes = file.get_tensor("model.layers.1.mlp.up_proj.weight")
        absmax = file.get_tensor("model.layers.1.mlp.up_proj.weight.absmax")
    assert metadata == {"source": model_digest(model), "dtype": "float32"}
    assert codes.shape == (64 * 32 // 2,)
    assert absmax.shape == (64 * 32 // 64,)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def read_codes(device: Device, arrays: dict[str, Array]) -> dict[str, bytes]:
    return {name: device.read(a).tobytes() for name, a in arrays.items() if a.kind == "nf4"}


def test_a_good_file_is_used_again_and_another_model_has_its_own(
    model: Path, device: Device, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(model, quantization="nf4")
    first = read_codes(device, load_frozen(model, config, MemoryPool(device)).arrays)
    with caplog.at_level(logging.INFO):
        assert read_codes(device, load_frozen(model, config, MemoryPool(device)).arrays) == first
    assert "quantising" not in caplog.text
    flip_last_byte(model / "model.safetensors")
    load_frozen(model, config, MemoryPool(device))
    before, after = kept(cache)
    assert before.read_bytes() != after.read_bytes()


def test_where_nothing_can_be_written_it_is_made_for_this_run(
    model: Path, device: Device, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file")
    config = config_of(model, quantization="nf4")
    first = read_codes(device, load_frozen(model, config, MemoryPool(device)).arrays)
    assert "set MOTLEY_CACHE to a folder to write to; quantised for this run only" in caplog.text
    cache.unlink()
    assert first == read_codes(device, load_frozen(model, config, MemoryPool(device)).arrays)
    assert len(kept(cache)) == 1


def test_a_plan_takes_what_loading_takes(model: Path, device: Device) -> None:
    for settings in ({}, {"dtype": "bfloat16"}, {"quantization": "nf4"}):
        config = config_of(model, **settings)
        planned, loaded = MemoryPool(None), MemoryPool(device)
        take_frozen(read_architecture(model), config, planned)
        load_frozen(model, config, loaded)
        assert planned.report_budget() == loaded.report_budget()
        assert planned.report_budget().parts["frozen"] > 0
