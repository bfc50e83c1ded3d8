"""Causal softmax: against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels import softmax

SCALE = 0.3
SHAPES = [(1, 1, 1, 0), (2, 14, 7, 0), (1, 65, 65, 0), (3, 5, 10, 13), (1, 140, 70, 70)]
"""Z, R, length, first row."""


def positions(rows: int, length: int, first_row: int) -> np.ndarray:
    return (first_row + np.arange(rows)) % length


def causal_softmax(scores: torch.Tensor, visible: np.ndarray, scale: float = SCALE) -> torch.Tensor:
    """Return torch's softmax of scores `[Z, R, keys]` over the first `visible` `[Z, R]` keys."""
    hidden = torch.arange(scores.shape[2]) >= torch.tensor(visible)[..., None]
    return (scale * scores).masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize(("matrices", "rows", "length", "first"), SHAPES)
def test_forward_is_torchs(
    device: Device, matrices: int, rows: int, length: int, first: int
) -> None:
    scores = 10 * draw(matrices, rows, length)
    settings = {"length": length, "scale": SCALE, "first_row": first}
    (got,) = run(device, softmax.causal_softmax, [], [scores], **settings)
    visible = positions(rows, length, first)[None] + 1
    agree(got, causal_softmax(leaf(scores), visible))


@pytest.mark.parametrize(("matrices", "rows", "length", "first"), SHAPES[1:])
def test_backward_is_autograds(
    device: Device, matrices: int, rows: int, length: int, first: int
) -> None:
    raw, dout = draw(matrices, rows, length), draw(matrices, rows, length, number=1)
    visible = positions(rows, length, first)[None] + 1
    scores = leaf(raw)
    p = causal_softmax(scores, visible)
    settings = {"length": length, "scale": SCALE, "first_row": first}
    given = [p.detach().numpy()]
    (got,) = run(device, softmax.causal_softmax_backward, given, [dout], **settings)
    agree(got, gradients(p, dout, scores)[0])


def test_large_scores_do_not_overflow(device: Device) -> None:
    scores = np.array([[[-3e4, 3e4, 0.0], [1e30, 2e4, 0.0], [-1e30, -1e30, -2e30]]], np.float32)
    (got,) = run(device, softmax.causal_softmax, [], [scores], length=3, scale=1.0)
    agree(got, causal_softmax(leaf(scores), np.array([[1, 2, 3]]), 1.0))


def test_a_nan_reaches_the_whole_row(device: Device) -> None:
    scores = draw(1, 3, 3)
    scores[0, 1, 0] = np.nan
    (got,) = run(device, softmax.causal_softmax, [], [scores], length=3, scale=1.0)
    assert np.isnan(got[0, 1, :2]).all()
    assert np.isfinite(got[0, [0, 2]]).all()


@pytest.mark.parametrize("length", [1, 3])
def test_cached_keys_are_seen_up_to_the_querys_own(device: Device, length: int) -> None:
    starts, kv_heads, group, slots = np.array([5, 0]), 3, 2, 70
    scores = draw(len(starts) * kv_heads, group * length, slots)
    settings = {"length": length, "scale": SCALE}
    (got,) = run(device, softmax.cached_softmax, [starts], [scores], **settings)
    own = starts.repeat(kv_heads)[:, None] + positions(group * length, length, 0)
    agree(got, causal_softmax(leaf(scores), own + 1))
