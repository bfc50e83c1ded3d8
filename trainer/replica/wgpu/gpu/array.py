"""Device memory with a shape: what kernels read and write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import wgpu

Kind = Literal["f32", "u32", "bf16", "nf4"]

ALIGNMENT = 256
"""Bytes that a window into a buffer is aligned to: the most that any device asks for."""
NF4_BLOCK = 64
"""Elements that share one absmax, counted over the flattened tensor (bitsandbytes)."""


@dataclass(frozen=True)
class Array:
    """A row-major tensor in a buffer; the last axis is contiguous."""

    buffer: wgpu.GPUBuffer | None
    """None in a plan, which counts bytes and runs nothing."""
    shape: tuple[int, ...]
    kind: Kind = "f32"
    """`bf16` and `nf4` are packed into u32, lowest element in the lowest bits; in a byte of NF4 the
    high nibble is the first (the layout of bitsandbytes)."""
    offset: int = 0
    """Bytes from the start of the buffer."""
    scales: Array | None = None
    """For `nf4` the absmax of every 64 elements, f32."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, a multiple of 4; without the scales."""
        return nbytes(self.shape, self.kind)

    def reshape(self, *shape: int) -> Array:
        """Return the same elements under another shape."""
        assert math.prod(shape) == self.size, f"{self.shape} has no shape {shape}"
        return replace(self, shape=shape)

    def rows(self, start: int, stop: int) -> Array:
        """Return a window of the first axis; it must begin at an aligned byte."""
        assert 0 <= start < stop <= self.shape[0], (start, stop, self.shape)
        row = self.size // self.shape[0]
        begin = nbytes((start * row,), self.kind)
        assert begin % ALIGNMENT == 0, f"row {start} of {self.shape} is not aligned"
        scales = self.scales
        if scales is not None:
            assert start * row % (NF4_BLOCK * NF4_BLOCK) == 0, "the scales would not be aligned"
            scales = scales.rows(start * row // NF4_BLOCK, -(-stop * row // NF4_BLOCK))
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + begin, scales=scales)


def nbytes(shape: tuple[int, ...], kind: Kind) -> int:
    """Return the bytes of a tensor, rounded up to whole 4-byte words."""
    bits = {"f32": 32, "u32": 32, "bf16": 16, "nf4": 4}[kind] * math.prod(shape)
    return -(-bits // 32) * 4


def aligned(size: int) -> int:
    """Return `size` bytes rounded up to a whole number of aligned pieces, at least one."""
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


def windows(weight: Array, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of a matrix, each within the bytes that a kernel argument may span.

    A window begins at an aligned byte, of the NF4 scales as well.
    """
    rows, columns = weight.shape
    if weight.nbytes <= limit:
        yield 0, rows
        return
    step = 1
    while not _aligned(weight, step, columns):
        step *= 2
    count = limit * rows // weight.nbytes // step * step
    assert count > 0, f"{weight.shape} cannot be bound in windows of {limit} bytes"
    for start in range(0, rows, count):
        yield start, min(rows, start + count)


def _aligned(weight: Array, rows: int, columns: int) -> bool:
    elements = rows * columns
    if weight.kind == "nf4":
        return elements % (NF4_BLOCK * ALIGNMENT // 4) == 0
    return elements * (2 if weight.kind == "bf16" else 4) % ALIGNMENT == 0
