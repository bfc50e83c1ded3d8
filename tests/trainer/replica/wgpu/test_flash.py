"""Attention in one kernel against torch; where it is not taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.replica.wgpu.on_device import agree, draw, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels.flash import flash_attention, serves
from trainer.replica.wgpu.kernels.gemm.choice import Variants


@pytest.fixture(autouse=True)
def lanes(device: Device) -> None:
    if not Variants(device).sharing:
        pytest.skip("this device has no subgroups of 8")


def attention(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float
) -> torch.Tensor:
    q, k, v = (torch.tensor(array, dtype=torch.float64) for array in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)


@pytest.mark.parametrize("length", [1, 16, 45, 100])
@pytest.mark.parametrize("width", [32, 96, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_output(device: Device, length: int, width: int, heads: int, kv_heads: int) -> None:
    queries = draw(2, heads, length, width)
    keys, values = (draw(2, kv_heads, length, width, number=number) for number in (1, 2))
    scale = width**-0.5
    start = [np.full(queries.shape, np.nan)]
    (out,) = run(device, flash_attention, [queries, keys, values], start, scale=scale)
    agree(out, attention(queries, keys, values, scale), 1e-6)


def test_scores_that_are_far_apart_do_not_overflow(device: Device) -> None:
    queries = 100 * draw(1, 1, 70, 64)
    keys, values = draw(1, 1, 70, 64, number=1), draw(1, 1, 70, 64, number=2)
    start = [np.zeros(queries.shape)]
    (out,) = run(device, flash_attention, [queries, keys, values], start, scale=1.0)
    agree(out, attention(queries, keys, values, 1.0), 1e-4)  # exponents in the thousands


def test_a_nan_reaches_the_output(device: Device) -> None:
    queries, keys, values = (draw(1, 1, 40, 32, number=number) for number in range(3))
    keys[0, 0, 20, 3] = np.nan
    start = [np.zeros(queries.shape)]
    (out,) = run(device, flash_attention, [queries, keys, values], start, scale=1.0)
    assert np.isfinite(out[0, 0, :20]).all()
    assert np.isnan(out[0, 0, 20:]).any(axis=-1).all()


def test_it_serves_software_devices_and_whole_vectors_alone(device: Device) -> None:
    assert serves(device, 128) == device.adapter.software
    assert not serves(device, 80)
    assert not serves(device, 256)
    assert not serves(None, 128)
    gpu = Device(device.adapter)
    gpu.adapter = replace(gpu.adapter, kind="discrete")
    assert not serves(gpu, 128)
