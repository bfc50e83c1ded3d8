"""Our quantiser makes the bytes of bitsandbytes, so that every backend has the same base."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.replica.weights.nf4 import VALUES, dequantize, quantize

functional = pytest.importorskip("bitsandbytes.functional")

SHAPES = [(64,), (1, 1), (3, 21), (64, 64), (96, 100), (31, 33), (129, 130), (512, 1024)]


def reference(values: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype):
    tensor = torch.from_numpy(values).reshape(shape).to(dtype)
    packed, state = functional.quantize_4bit(tensor, quant_type="nf4", compress_statistics=False)
    with torch.compiler.set_stance("force_eager"):  # it would compile for every shape
        whole = functional.dequantize_4bit(packed, state)
    return packed.numpy().reshape(-1), state.absmax.numpy(), whole.float().numpy().reshape(-1)


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values that bf16 holds exactly, as those of models mostly are."""
    values = np.random.default_rng(seed).normal(0, 0.03, int(np.prod(shape)))
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_bitsandbytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = draw(shape, 1)
    codes, absmax, _ = reference(values, shape, dtype)
    ours, scales = quantize(values)
    np.testing.assert_array_equal(ours, codes)
    assert scales.tobytes() == absmax.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_values_that_bf16_cannot_hold(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(2).normal(0, 1, int(np.prod(shape))).astype(np.float32)
    codes, absmax, _ = reference(values, shape, torch.float32)
    ours, scales = quantize(values)
    np.testing.assert_array_equal(ours, codes)
    assert scales.tobytes() == absmax.tobytes()


def ties() -> np.ndarray:
    """Blocks whose elements lie on, just below and just above every midpoint."""
    midpoints = (VALUES[:-1] + VALUES[1:]) / 2
    below, above = np.nextafter(midpoints, np.float32(-2)), np.nextafter(midpoints, np.float32(2))
    relative = np.concatenate([midpoints, below, above, np.zeros(18, np.float32), [1.0]])
    return (relative[None, :] * np.array([[1.0], [3.0], [0.7], [1e-3]])).astype(np.float32).ravel()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(192, np.float32),
        np.zeros(70, np.float32),  # the tail is a block of zeros of its own
        np.full(128, -0.0, np.float32),
        np.full(65, 2e-39, np.float32),  # below the smallest normal number
        np.full(65, -3e38, np.float32),
        ties(),
    ],
    ids=["zero", "zero-tail", "minus-zero", "denormal", "large", "ties"],
)
def test_the_edges(values: np.ndarray) -> None:
    codes, absmax, _ = reference(values, values.shape, torch.float32)
    ours, scales = quantize(values)
    np.testing.assert_array_equal(ours, codes)
    assert scales.tobytes() == absmax.tobytes()


def test_a_tensor_in_pieces_of_whole_blocks() -> None:
    values = draw((10, 100), 3)
    whole, scales = quantize(values)
    pieces = [quantize(values[start : start + 192]) for start in range(0, values.size, 192)]
    np.testing.assert_array_equal(np.concatenate([codes for codes, _ in pieces]), whole)
    np.testing.assert_array_equal(np.concatenate([absmax for _, absmax in pieces]), scales)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_back_is_that_of_bitsandbytes(shape: tuple[int, ...]) -> None:
    values = draw(shape, 4)
    codes, absmax, whole = reference(values, shape, torch.float32)
    np.testing.assert_array_equal(dequantize(codes, absmax, values.size), whole)
