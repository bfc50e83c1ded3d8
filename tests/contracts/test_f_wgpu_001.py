"""F-WGPU-001: a matrix product on the GPU matches the CPU within 1e-4, at a real layer's sizes.

Every variant and odd size is in tests/trainer/replica/wgpu/test_gemm.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from trainer.replica.wgpu.adapter import adapters
from trainer.replica.wgpu.array import Array, Kind
from trainer.replica.wgpu.device import Device
from trainer.replica.wgpu.floats import from_bf16, to_bf16
from trainer.replica.wgpu.graph import Graph
from trainer.replica.wgpu.kernels.gemm import gemm
from trainer.replica.wgpu.nf4 import dequantize, quantize

ROWS, OUT, IN = 64, 1024, 3072
"""Tokens of a micro-batch, and a linear of Qwen3-0.6B."""


@pytest.fixture(scope="module")
def device() -> Device:
    found = adapters()
    if not found:
        pytest.skip("no Vulkan device (Debian: apt install mesa-vulkan-drivers)")
    return Device(found[0])


def put(device: Device, values: np.ndarray, kind: Kind = "f32") -> tuple[Array, np.ndarray]:
    """Return values on the device, and what the kernel should read there."""
    array = device.array(values.shape, kind)
    if kind == "f32":
        device.write(array, values)
        return array, values
    if kind == "bf16":
        packed = to_bf16(values.reshape(-1))
        device.write(array, packed)
        return array, from_bf16(packed).reshape(values.shape)
    codes, absmax = quantize(values.reshape(-1))
    assert array.scales is not None
    device.write(array, codes)
    device.write(array.scales, absmax)
    return array, dequantize(codes, absmax, values.size).reshape(values.shape)


@pytest.mark.parametrize("kind", ["f32", "bf16", "nf4"])
def test_products_match_the_cpu(device: Device, kind: Kind) -> None:
    generator = np.random.default_rng(0)
    x, x_read = put(device, generator.standard_normal((ROWS, IN)).astype(np.float32))
    weight, weight_read = put(device, generator.standard_normal((OUT, IN)).astype(np.float32), kind)
    y, dx = device.array((ROWS, OUT)), device.array((ROWS, IN))
    graph = Graph(device)
    gemm(graph, x, weight, y, trans_b=True, m=ROWS, n=OUT, k=IN)
    gemm(graph, y, weight, dx, m=ROWS, n=IN, k=OUT)
    graph.run()
    expected = x_read.astype(np.float64) @ weight_read.astype(np.float64).T
    back = expected @ weight_read.astype(np.float64)
    for mine, right in ((device.read(y), expected), (device.read(dx), back)):
        error = np.abs(mine - right).max() / np.abs(right).max()
        print(f"{kind}: off by {error:.1e} of the largest")  # noqa: T201 - pytest -s
        assert error < 1e-4, f"{kind}: off by {error:.1e} of the largest"
