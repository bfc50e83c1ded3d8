"""Run a binder on NumPy arrays, and measure what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainer.planning.vulkan_buffers import Kind
from trainer.replica.weights.nf4 import dequantize, quantize
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph, Grid


def put(device: Device, values: np.ndarray) -> Array:
    """Return values on the device: floats as f32, integers as u32."""
    floats = values.dtype.kind == "f"
    array = device.create_array(values.shape, "f32" if floats else "u32")
    device.write(array, values.astype(np.float32 if floats else np.uint32))
    return array


def packed(device: Device, values: np.ndarray, kind: Kind) -> tuple[Array, np.ndarray]:
    """Return a matrix in a format of frozen weights, and what it holds after rounding."""
    array = device.create_array(values.shape, kind)
    if kind == "f32":
        device.write(array, values)
        return array, values
    if kind == "bf16":
        halves = (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
        words = np.resize(np.append(halves, np.uint16(0)), 2 * -(-halves.size // 2))
        device.write(array, words)
        return array, (halves.astype(np.uint32) << 16).view(np.float32).reshape(values.shape)
    codes, absmax = quantize(values.reshape(-1))
    raw = np.zeros(array.nbytes, np.uint8)
    raw[: codes.size] = codes
    device.write(array, raw)
    assert array.scales is not None
    device.write(array.scales, absmax)
    return array, dequantize(codes, absmax, values.size).reshape(values.shape)


def run(
    device: Device,
    binder: Callable[..., None],
    inputs: Sequence[Any],
    outputs: Sequence[np.ndarray],
    **settings: Any,
) -> list[np.ndarray]:
    """Return what the binder makes of `outputs`, whose values are there before it runs.

    NumPy arrays among inputs and settings go to the device, all else is passed on as it is. The
    binder's work runs twice from the same start, the second time with its workgroups in rows of 3,
    as a grid has them once they are too many for one row; the bits must agree.
    """

    def there(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(there(part) for part in value)
        return put(device, value) if isinstance(value, np.ndarray) else value

    given = [there(value) for value in inputs]
    named = {name: there(value) for name, value in settings.items()}
    results: list[list[np.ndarray]] = []
    for fold in (False, True):
        graph = Graph(device)
        places = [put(device, values) for values in outputs]
        binder(graph, *given, *places, **named)
        if fold:
            graph.dispatches = [replace(item, grid=folded(item.grid)) for item in graph.dispatches]
        graph.run()
        results.append([device.read(place).reshape(place.shape) for place in places])
    for first, second in zip(*results, strict=True):
        assert first.tobytes() == second.tobytes(), "two runs differ"
    return results[0]


def folded(grid: Grid) -> Grid:
    groups, rows, _ = grid
    return (min(groups, 3), -(-groups // 3), 1) if rows == 1 else grid


def agree(got: np.ndarray, expected: np.ndarray | torch.Tensor, tolerance: float = 1e-5) -> None:
    """Assert that the worst element is off by at most `tolerance` of the largest one."""
    wanted = np.asarray(expected.detach() if isinstance(expected, torch.Tensor) else expected)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    off = float(np.abs(got - wanted).max())
    largest = float(np.abs(wanted).max())
    assert off <= tolerance * largest, f"off by {off:.2e} of {largest:.2e}"


def draw(*shape: int, number: int = 0) -> np.ndarray:
    """Return normal values, fp32, always the same for a shape and number."""
    rng = np.random.default_rng([number, *shape])
    return rng.standard_normal(shape).astype(np.float32)


def leaf(values: np.ndarray) -> torch.Tensor:
    """Return a float64 tensor that collects a gradient."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def gradients(y: torch.Tensor, dy: np.ndarray, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the leaves from that of y."""
    return torch.autograd.grad(y, leaves, torch.tensor(dy, dtype=torch.float64))
