"""Heads, their norm and their rotation: against torch and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from tests.trainer.replica.wgpu.on_device import agree, draw, gradients, leaf, run
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels import heads

EPS = 1e-6
SHAPES = [(1, 1, 1, 64), (2, 3, 5, 80), (1, 2, 7, 96), (2, 1, 3, 128), (1, 2, 2, 256)]
"""B, H, T, d"""
FEATURES = [(False, False), (True, False), (False, True), (True, True)]
"""Norm, rotation."""

Tables = tuple[np.ndarray, np.ndarray]


def tables(positions: int, head_dim: int) -> Tables:
    frequencies = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def merge_heads(x: np.ndarray) -> np.ndarray:
    batch, count, length, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch * length, count * head_dim)


def split_heads(
    x: torch.Tensor,
    shape: tuple[int, ...],
    weight: torch.Tensor | None,
    rope: Tables | None,
    starts: np.ndarray | None = None,
) -> torch.Tensor:
    """Return heads with torch's norm and transformers' rotation, each sample from its start."""
    batch, count, length, head_dim = shape
    out = x.view(batch, length, count, head_dim)
    if weight is not None:
        out = F.rms_norm(out, (head_dim,), weight, EPS)
    out = out.transpose(1, 2)
    if rope is not None:
        positions = (np.zeros(batch, int) if starts is None else starts)[:, None]
        at = positions + np.arange(length)
        cosines, sines = (torch.tensor(table[at]).tile(1, 1, 2).double() for table in rope)
        out, _ = apply_rotary_pos_emb(out, out, cosines, sines)
    return out


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    batch, count, length, head_dim = shape
    return batch * length, count * head_dim


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_split_is_torchs(
    device: Device, shape: tuple[int, ...], features: tuple[bool, bool]
) -> None:
    x = draw(*rows_of(shape))
    weight = draw(shape[3]) if features[0] else None
    rope = tables(9, shape[3]) if features[1] else None
    settings = {"norm": weight, "rope": rope, "eps": EPS}
    (out,) = run(device, heads.split_heads, [x], [np.zeros(shape)], **settings)
    agree(out, split_heads(leaf(x), shape, leaf(weight) if weight is not None else None, rope))


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("shape", SHAPES)
def test_split_backward_is_autograds(
    device: Device, shape: tuple[int, ...], features: tuple[bool, bool]
) -> None:
    x, dout = draw(*rows_of(shape)), draw(*shape, number=1)
    weight = draw(shape[3]) if features[0] else None
    rope = tables(9, shape[3]) if features[1] else None
    settings = {"norm": weight, "rope": rope, "eps": EPS}
    (dx,) = run(device, heads.split_heads_backward, [x, dout], [np.zeros(x.shape)], **settings)
    raw = leaf(x)
    out = split_heads(raw, shape, leaf(weight) if weight is not None else None, rope)
    agree(dx, gradients(out, dout, raw)[0])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_gradient_is_autograds(device: Device, shape: tuple[int, ...], turned: bool) -> None:
    x, dout, before = draw(*rows_of(shape)), draw(*shape, number=1), draw(shape[3])
    rope = tables(9, shape[3]) if turned else None
    inputs = [MemoryPool(device), x, dout]
    (dweight,) = run(device, heads.head_norm_gradient, inputs, [before], rope=rope, eps=EPS)
    weight = leaf(before)
    out = split_heads(leaf(x), shape, weight, rope)
    agree(dweight, before + gradients(out, dout, weight)[0].numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_merge_and_its_backward_move_every_element(device: Device, shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    (merged,) = run(device, heads.merge_heads, [x], [np.zeros(rows_of(shape))])
    np.testing.assert_array_equal(merged, merge_heads(x))
    (back,) = run(device, heads.merge_heads_backward, [merged], [np.zeros(shape)])
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("length", [1, 3])
def test_rows_land_in_the_cache_at_their_positions(device: Device, length: int) -> None:
    batch, count, slots, head_dim = 3, 2, 9, 8
    starts = np.array([4, 0, 6])
    x, before = draw(batch * length, count * head_dim), draw(batch, count, slots, head_dim)
    rope = tables(slots, head_dim)
    settings = {"rope": rope, "starts": starts, "cached": True}
    (cache,) = run(device, heads.split_heads, [x], [before], **settings)
    expected = before.astype(np.float64)
    new = split_heads(leaf(x), (batch, count, length, head_dim), None, rope, starts).detach()
    for sample, start in enumerate(starts):
        expected[sample, :, start : start + length] = new[sample].numpy()
    agree(cache, expected)
    queries = np.zeros((batch, count, length, head_dim))
    (turned,) = run(device, heads.split_heads, [x], [queries], rope=rope, starts=starts)
    agree(turned, new)
