"""top-k: of each tensor the largest values alone, and where they are (arXiv:1704.05021).

Each tensor has its own share: over a whole block, an adapter's A would starve beside its B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from trainer.exchange.protocol.codecs import Bytes, Float32
from trainer.exchange.protocol.compression.received import check_finite, check_length
from trainer.system.errors import ProtocolError

CHUNK = 1 << 16
"""Elements that a 16-bit index reaches."""
_LARGEST_BF16 = np.float32(np.array([0x7F7F], np.uint16).view(bfloat16)[0])

Indices = NDArray[np.intp]


@dataclass(frozen=True)
class _Part:
    """One tensor's place in a block's elements and in its bytes."""

    first: int
    elements: int
    kept: int
    offset: int

    @property
    def has_bitmap(self) -> bool:
        """Whether a bit for each element is shorter than the indices: a matter of sizes alone."""
        return _bitmap_bytes(self.elements) <= _index_bytes(self.elements, self.kept)

    @property
    def position_bytes(self) -> int:
        if self.has_bitmap:
            return _bitmap_bytes(self.elements)
        return _index_bytes(self.elements, self.kept)

    @property
    def nbytes(self) -> int:
        return self.position_bytes + 2 * self.kept


class TopK:
    """The `density` n largest of n values of each tensor, as bf16; at least one.

    Bytes of a tensor: its positions, then its values in the order of positions. Positions are a
    bitmap, lowest bit first, or, where that is shorter, for each 65,536 elements a count
    (little-endian, 32 bits), then for each value its index within them (16 bits). The sizes follow
    from the layout, so nothing in the bytes says how long they are.

    Args:
        density: share of the elements that is kept.
        shapes: of each tensor of the block, in order.
    """

    id = 4

    def __init__(self, density: float, shapes: Sequence[tuple[int, ...]]) -> None:
        self.name = "topk:" + f"{density:.6f}".rstrip("0")
        self._parts = tuple(_lay_out(density, [math.prod(shape) for shape in shapes]))
        self._elements = sum(part.elements for part in self._parts)

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the block, which has so many elements."""
        assert elements == self._elements, f"a block of {self._elements}, not {elements}"
        return sum(part.nbytes for part in self._parts)

    def encode(self, block: int, values: Float32) -> Bytes:
        """Return positions and values of each tensor; the values are finite."""
        del block  # bound to one
        encoded = np.zeros(self.nbytes(values.size), np.uint8)
        for part in self._parts:
            tensor = values[part.first : part.first + part.elements]
            chosen = largest(tensor, part.kept)
            split, end = part.offset + part.position_bytes, part.offset + part.nbytes
            _write_positions(part, chosen, encoded[part.offset : split])
            kept = np.clip(tensor[chosen], -_LARGEST_BF16, _LARGEST_BF16)  # never up to infinity
            encoded[split:end] = kept.astype(bfloat16).view(np.uint8)
        return encoded

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Write zeros, and the values at their positions; after an error `out` is undefined.

        Raises:
            ProtocolError: the length is wrong; a bitmap has another number of values, or values
                beyond its tensor; an index is beyond its tensor, or not above the one before; a
                value is not finite.
        """
        check_length(self.name, encoded, self.nbytes(out.size))
        out[...] = 0
        for part in self._parts:
            split, end = part.offset + part.position_bytes, part.offset + part.nbytes
            chosen = _read_positions(self.name, part, encoded[part.offset : split])
            check_finite(self.name, encoded[split:end])
            kept = encoded[split:end].view(bfloat16)
            out[part.first : part.first + part.elements][chosen] = kept


def largest(values: Float32, count: int) -> Indices:
    """Return where the `count` largest magnitudes are, ascending.

    Magnitudes are compared by the upper half of their bits, so to bf16's precision; of equal ones
    the first are taken. A histogram of the 32,768 of them is several times faster than
    np.partition where NumPy has no vectorised one.
    """
    keys = np.empty(values.size, np.uint16)
    counts = np.zeros(1 << 15, np.intp)
    for start in range(0, values.size, CHUNK):
        bits = values[start : start + CHUNK].view(np.uint32) >> 16
        part = keys[start : start + CHUNK]
        np.bitwise_and(bits, 0x7FFF, out=part, casting="unsafe")
        counts += np.bincount(part, minlength=1 << 15)
    from_top = np.cumsum(counts[::-1])
    threshold = (1 << 15) - 1 - int(np.searchsorted(from_top, count))
    chosen = np.flatnonzero(keys >= threshold)
    surplus = chosen.size - count
    if surplus:
        tied = np.flatnonzero(keys[chosen] == threshold)
        chosen = np.delete(chosen, tied[-surplus:])
    return chosen


def _lay_out(density: float, sizes: Sequence[int]) -> Iterator[_Part]:
    first = offset = 0
    for elements in sizes:
        part = _Part(first, elements, max(1, round(density * elements)), offset)
        yield part
        first, offset = first + elements, offset + part.nbytes


def _bitmap_bytes(elements: int) -> int:
    return -(-elements // 8)


def _index_bytes(elements: int, kept: int) -> int:
    return 4 * -(-elements // CHUNK) + 2 * kept


def _write_positions(part: _Part, chosen: Indices, into: Bytes) -> None:
    if part.has_bitmap:
        marks = np.zeros(part.elements, np.bool_)
        marks[chosen] = True
        into[...] = np.packbits(marks, bitorder="little")
        return
    chunks = -(-part.elements // CHUNK)
    into[: 4 * chunks].view("<u4")[...] = np.bincount(chosen // CHUNK, minlength=chunks)
    into[4 * chunks :].view("<u2")[...] = chosen % CHUNK


def _read_positions(name: str, part: _Part, encoded: Bytes) -> Indices:
    """Return the ascending indices of `part.kept` values; allocates by the layout's sizes only."""
    if part.has_bitmap:
        marks = np.unpackbits(encoded, bitorder="little").view(np.bool_)  # nonzero is fast on bool
        if marks[part.elements :].any():
            raise ProtocolError(f"{name}: a bitmap marks values beyond its tensor")
        marked = np.count_nonzero(marks)
        if marked != part.kept:
            raise ProtocolError(f"{name}: a bitmap marks {marked} values, {part.kept} are due")
        return np.flatnonzero(marks)
    chunks = -(-part.elements // CHUNK)
    counts = encoded[: 4 * chunks].view("<u4").astype(np.int64)
    if counts.sum() != part.kept:
        raise ProtocolError(f"{name}: counts of {counts.sum()} values, {part.kept} are due")
    chosen = np.repeat(np.arange(chunks, dtype=np.intp) * CHUNK, counts)
    chosen += encoded[4 * chunks :].view("<u2")
    if not (np.diff(chosen) > 0).all():
        raise ProtocolError(f"{name}: an index is not above the one before it")
    if chosen[-1] >= part.elements:
        raise ProtocolError(f"{name}: index {chosen[-1]} of a tensor of {part.elements}")
    return chosen
