"""RMSNorm: against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch.nn.functional as F

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels import norm

EPS = 1e-6
SHAPES = [(1, 1), (1, 64), (3, 80), (5, 63), (2, 65), (7, 1000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_torchs(device: Device, shape: tuple[int, int]) -> None:
    x, weight = draw(*shape), draw(shape[1])
    (y,) = run(device, norm.rms_norm, [x, weight], [np.zeros(shape)], eps=EPS)
    agree(y, F.rms_norm(leaf(x), shape[1:], leaf(weight), EPS))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_backward_is_autograds(device: Device, shape: tuple[int, int], accumulate: bool) -> None:
    x, weight, dy, before = (
        draw(*shape),
        draw(shape[1]),
        *(draw(*shape, number=n) for n in (1, 2)),
    )
    settings = {"eps": EPS, "accumulate": accumulate}
    (dx,) = run(device, norm.rms_norm_backward, [x, weight, dy], [before], **settings)
    kept = before * accumulate
    a, b = leaf(x), leaf(weight)
    agree(dx, kept + gradients(F.rms_norm(a, shape[1:], b, EPS), dy, a)[0].numpy())


@pytest.mark.parametrize("shape", [*SHAPES[1:], (1000, 70)])
def test_weight_gradient_is_autograds(device: Device, shape: tuple[int, int]) -> None:
    x, dy, before = draw(*shape), draw(*shape, number=1), draw(shape[1], number=2)
    inputs = [MemoryPool(device), x, dy]
    (dweight,) = run(device, norm.rms_norm_weight_gradient, inputs, [before], eps=EPS)
    a, b = leaf(x), leaf(np.ones(shape[1]))
    agree(dweight, before + gradients(F.rms_norm(a, shape[1:], b, EPS), dy, b)[0].numpy())
