"""SwiGLU: against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels import elementwise as kernels

SHAPES = [(1, 1), (3, 80), (5, 129)]


def backward(graph: Graph, dy: Array, gate: Array, up: Array) -> None:
    kernels.swiglu_backward(graph, gate, up, dy)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_torchs(device: Device, shape: tuple[int, int]) -> None:
    gate, up = 5 * draw(*shape), draw(*shape, number=1)
    (y,) = run(device, kernels.swiglu, [gate, up], [np.zeros(shape)])
    agree(y, F.silu(leaf(gate)) * leaf(up))


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_is_autograds(device: Device, shape: tuple[int, int]) -> None:
    gate, up, dy = 5 * draw(*shape), draw(*shape, number=1), draw(*shape, number=2)
    got = run(device, backward, [dy], [gate, up])
    a, b = leaf(gate), leaf(up)
    for ours, theirs in zip(got, gradients(F.silu(a) * b, dy, a, b), strict=True):
        agree(ours, theirs)


def test_the_far_ends_are_finite(device: Device) -> None:
    gate, ones = np.array([[-1e4, -100.0, 100.0, 1e4]], np.float32), np.ones((1, 4), np.float32)
    (y,) = run(device, kernels.swiglu, [gate, ones], [np.zeros((1, 4))])
    agree(y, F.silu(torch.tensor(gate)))
    dgate, dup = run(device, backward, [ones], [gate, ones])
    agree(dgate, np.array([[0.0, 0.0, 1.0, 1.0]]))
    agree(dup, F.silu(torch.tensor(gate)))
