"""Attention to stored keys and values against NumPy, and what room a store takes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.wgpu.generation.kv_store import KVStore, count_fitting_layers
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError

SHAPES = [KVShape(4, 2, 32), KVShape(6, 2, 20), KVShape(3, 3, 16), KVShape(8, 1, 64)]


def attention(
    queries: NDArray[np.float64], keys: NDArray[np.float64], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return `[Hq, d]` of one sample: queries `[Hq, d]`, keys and values `[Hkv, n, d]`."""
    groups = np.split(queries, len(keys))
    mixed: list[NDArray[np.float64]] = []
    for group, own, given in zip(groups, keys, values, strict=True):
        scores = group @ own.T / np.sqrt(queries.shape[1])
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mixed.append(weights / weights.sum(1, keepdims=True) @ given)
    return np.concatenate(mixed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_attend_to_all_up_to_themselves(device: Device, shape: KVShape) -> None:
    """Two layers; rows of different lengths, one of which passes a width; a second batch."""
    draw = np.random.default_rng(5)
    store = KVStore(device, shape, [3, 7])
    for batch, lengths in ((2, [126, 5]), (2, [3, 40]), (1, [9])):
        slots = max(lengths) + 4
        store.begin(batch, slots)
        kept = {
            layer: draw.normal(size=(2, batch, shape.num_kv_heads, slots, shape.head_dim))
            for layer in (3, 7)
        }
        longest = max(lengths)
        for layer, (keys, values) in kept.items():
            given = [part[:, :, :longest].astype(np.float32) for part in (keys, values)]
            store.fill(layer, given[0], given[1])  # behind a shorter prompt is anything
        for step in range(4):
            places = np.array(lengths) + step
            for layer, (keys, values) in kept.items():
                queries = draw.normal(size=(batch, shape.num_heads, shape.head_dim))
                rows = np.arange(batch)
                asked = queries.astype(np.float32)
                new = [part[rows, :, places].astype(np.float32) for part in (keys, values)]
                found = store.attend(layer, asked, new[0], new[1], places)
                expected = [
                    attention(queries[row], keys[row, :, : at + 1], values[row, :, : at + 1])
                    for row, at in enumerate(places)
                ]
                np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-5)


def test_room_is_kept_for_batches_that_fit_and_freed_for_others(device: Device) -> None:
    shape, before = KVShape(4, 2, 32), device.allocated
    store = KVStore(device, shape, [0, 1])
    store.begin(2, 200)
    first = device.allocated - before
    assert first >= 2 * shape.cache_bytes(2, 200)
    store.begin(2, 100)
    assert device.allocated - before == first
    store.begin(1, 100)
    assert device.allocated - before < first


def test_what_exceeds_a_kernels_argument_is_out_of_memory(narrow: Device) -> None:
    store = KVStore(narrow, KVShape(4, 2, 32), [0])
    with pytest.raises(OutOfMemoryError, match="3072 tokens of 1 samples exceed the 0 MiB"):
        store.begin(1, 3000)


def test_layers_that_fit_by_the_free_memory(device: Device) -> None:
    shape = KVShape(4, 2, 64)
    some = count_fitting_layers(device, shape, 1, 1024)
    if some is None:
        pytest.skip("the driver does not report the device's memory")
    assert some > 0
    assert count_fitting_layers(device, shape, 1, 1 << 32) == 0
