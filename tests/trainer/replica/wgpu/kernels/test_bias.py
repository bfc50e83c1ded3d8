"""The bias of a linear layer: against NumPy and torch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.columns import add_column_sums
from trainer.replica.wgpu.kernels.elementwise import add_bias

SHAPES = [(1, 1), (3, 80), (129, 65), (1000, 3)]


def forward(graph: Graph, bias: Array, y: Array) -> None:
    add_bias(graph, y, bias)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_adds_to_every_row(device: Device, shape: tuple[int, int]) -> None:
    y, bias = draw(*shape), draw(shape[1], number=1)
    (got,) = run(device, forward, [bias], [y])
    np.testing.assert_array_equal(got, y + bias)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_is_autograds(device: Device, shape: tuple[int, int]) -> None:
    dy, before = draw(*shape), draw(shape[1], number=1)
    (got,) = run(device, add_column_sums, [MemoryPool(device), dy], [before])
    bias = leaf(before)
    agree(got, before + gradients(leaf(dy) + bias, dy, bias)[0].numpy())
