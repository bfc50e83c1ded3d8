"""F-WGPU-001: a matrix product on the GPU matches the CPU within 1e-4, at a real layer's sizes.

Every variant and odd size is in tests/trainer/replica/wgpu/kernels/test_gemm.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import packed
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.kernels.gemm.record import gemm

ROWS, OUT, IN = 64, 1024, 3072
"""Tokens of a micro-batch, and a linear of Qwen3-0.6B."""


@pytest.fixture(scope="module")
def device(vulkan: Adapter) -> Device:
    return Device(vulkan)


@pytest.mark.parametrize("kind", ["f32", "bf16", "nf4"])
def test_products_match_the_cpu(device: Device, kind: Kind) -> None:
    generator = np.random.default_rng(0)
    x, x_read = packed(device, generator.standard_normal((ROWS, IN)).astype(np.float32), "f32")
    values = generator.standard_normal((OUT, IN)).astype(np.float32)
    weight, weight_read = packed(device, values, kind)
    y, dx = device.create_array((ROWS, OUT)), device.create_array((ROWS, IN))
    graph = Graph(device)
    gemm(graph, x, weight, y, trans_b=True, m=ROWS, n=OUT, k=IN)
    gemm(graph, y, weight, dx, m=ROWS, n=IN, k=OUT)
    graph.run()
    expected = x_read.astype(np.float64) @ weight_read.astype(np.float64).T
    back = expected @ weight_read.astype(np.float64)
    for mine, right in ((device.read(y), expected), (device.read(dx), back)):
        error = np.abs(mine - right).max() / np.abs(right).max()
        print(f"{kind}: off by {error:.1e} of the largest")
        assert error < 1e-4, f"{kind}: off by {error:.1e} of the largest"
