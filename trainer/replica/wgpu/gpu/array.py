"""Device memory with a shape, which kernels read and write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.planning.vulkan_buffers import ALIGNMENT, NF4_BLOCK, Kind, row_windows, tensor_bytes

if TYPE_CHECKING:
    import wgpu


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
        return tensor_bytes(self.shape, self.kind)

    def reshape(self, *shape: int) -> Array:
        """Return the same elements under another shape."""
        assert math.prod(shape) == self.size, f"{self.shape} has no shape {shape}"
        return replace(self, shape=shape)

    def slice_rows(self, start: int, stop: int) -> Array:
        """Return a window of the first axis, which must begin at an aligned byte."""
        assert 0 <= start < stop <= self.shape[0], (start, stop, self.shape)
        row = self.size // self.shape[0]
        begin = tensor_bytes((start * row,), self.kind)
        assert begin % ALIGNMENT == 0, f"row {start} of {self.shape} is not aligned"
        scales = self.scales
        if scales is not None:
            assert start * row % (NF4_BLOCK * NF4_BLOCK) == 0, "the scales would not be aligned"
            scales = scales.slice_rows(start * row // NF4_BLOCK, -(-stop * row // NF4_BLOCK))
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + begin, scales=scales)


def iterate_windows(weight: Array, limit: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows of a matrix, each within the bytes that a kernel argument may span.

    A window begins at an aligned byte, also of the NF4 scales.
    """
    rows, columns = weight.shape
    yield from row_windows(rows, columns, weight.kind, limit)
