"""Trainable tensors on the device, aligned, and the way between them and the flat vector."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.small_model import write_data, write_model
from trainer.config.run import RunConfig
from trainer.model.layout import GradientLayout, build_layout
from trainer.planning.vulkan_buffers import ALIGNMENT
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.weights.slots import Slots


@pytest.fixture(scope="module", params=["lora", "full"])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("slots")
    data = write_data(folder / "data.jsonl")
    model = write_model(folder / "model", data)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model)},
            "data": {"train": str(data)},
            "num_classes": 3,
            "method": request.param,
            **({"lora": {"lora_rank": 3}} if request.param == "lora" else {}),
        }
    )
    return build_layout(model, config)


def test_a_block_comes_back_as_it_went(layout: GradientLayout) -> None:
    slots = Slots(layout)
    flat = np.random.default_rng(0).normal(size=layout.size).astype(np.float32)
    for block in layout.blocks:
        values = flat[block.start : block.stop]
        padded = slots.pad_block(block.index, values)
        assert padded.size == slots.padded_size(block.index) >= values.size
        np.testing.assert_array_equal(slots.unpad_block(block.index, padded), values)
        assert np.count_nonzero(padded) == np.count_nonzero(values)  # zeros between tensors


def test_tensors_are_aligned_and_apart(layout: GradientLayout) -> None:
    slots = Slots(layout)
    blocks = slots.take_arrays(MemoryPool(None), "gradients")
    tensors = slots.tensors_by_name(blocks)
    assert {name: array.shape for name, array in tensors.items()} == {
        slot.name: slot.shape for slot in layout.iter_tensors()
    }
    for block, whole in zip(layout.blocks, blocks, strict=True):
        end = 0
        for slot in block.tensors:
            array = tensors[slot.name]
            assert array.offset % ALIGNMENT == 0
            assert array.offset >= end
            end = array.offset + array.nbytes
        assert end <= whole.nbytes < end + ALIGNMENT


def test_what_a_block_carries_is_what_its_tensors_hold(
    layout: GradientLayout, device: Device
) -> None:
    slots = Slots(layout)
    blocks = slots.take_arrays(MemoryPool(device), "trainable")
    tensors = slots.tensors_by_name(blocks)
    flat = np.arange(layout.size, dtype=np.float32)
    for block, array in zip(layout.blocks, blocks, strict=True):
        device.write(array, slots.pad_block(block.index, flat[block.start : block.stop]))
    for slot in layout.iter_tensors():
        expected = flat[slot.start : slot.stop].reshape(slot.shape)
        np.testing.assert_array_equal(device.read(tensors[slot.name]), expected)
    for block, array in zip(layout.blocks, blocks, strict=True):
        values = slots.unpad_block(block.index, device.read(array))
        np.testing.assert_array_equal(values, flat[block.start : block.stop])
