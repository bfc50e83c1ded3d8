"""int8 and int4: whole numbers, and a scale for each group of values.

Groups are counted from the block's start; the last may be shorter. A group whose largest value is
too small for its scale becomes zeros. Every step is a NumPy operation that IEEE 754 rounds
correctly, so all CPUs decode the same bytes to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol.codecs import Bytes, Float32
from trainer.system.errors import ProtocolError

_PIECE = 64 * 1024
"""Values handled at a time: what lies between two operations stays in the cache."""
_LARGEST = np.finfo(np.float32).max
_SMALLEST = np.finfo(np.float32).tiny


class Int8:
    """Symmetric 8-bit integers, an fp32 scale for each 256 values.

    Bytes: the scales, little-endian fp32, then one signed byte a value. A value is its byte times
    its group's scale, the group's largest magnitude / 127, so it is off by at most half a scale.
    """

    id = 2
    name = "int8"
    group = 256

    def encoded_size(self, elements: int) -> int:
        """Return one byte an element and four a group."""
        return elements + 4 * _count_groups(elements, self.group)

    def encode(self, values: Float32) -> Bytes:
        """Return scales and integers; the values are finite."""
        encoded = np.empty(self.encoded_size(values.size), np.uint8)
        scales, numbers = self._split_encoded(encoded, values.size)
        piece = np.empty(min(_PIECE, values.size), np.float32)
        for start, stop, first, last in _iterate_chunks(values.size, self.group):
            part = piece[: stop - start]
            np.abs(values[start:stop], out=part)
            scale = _group_maxima(part, self.group)
            np.divide(scale, np.float32(127), out=scale)
            scale[scale < _SMALLEST] = 0  # 1 / scale would overflow
            np.minimum(scale, _LARGEST / np.float32(128), out=scale)  # so no product overflows
            scales[first:last] = scale
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
            _times_group(values[start:stop], inverse, self.group, part)
            np.rint(part, out=part)
            np.clip(part, -127, 127, out=part)
            numbers[start:stop] = part
        return encoded

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Multiply every integer by its scale.

        Raises:
            ProtocolError: the length is wrong, or a scale is negative, too large or no number.
        """
        _check_length(self, encoded, out.size)
        scales, numbers = self._split_encoded(encoded, out.size)
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            are_scales = (scales >= 0) & (scales <= _LARGEST / np.float32(128))  # false for NaN
        if not are_scales.all():
            raise ProtocolError("int8: a scale is negative, too large or not a number")
        for start, stop, first, last in _iterate_chunks(out.size, self.group):
            part = out[start:stop]
            part[...] = numbers[start:stop]
            _times_group(part, scales[first:last], self.group, part)

    def _split_encoded(self, encoded: Bytes, elements: int) -> tuple[Float32, NDArray[np.int8]]:
        split = 4 * _count_groups(elements, self.group)
        return encoded[:split].view("<f4"), encoded[split:].view(np.int8)


class Int4:
    """Symmetric 4-bit integers -7 to 7, a power of two for each 32 values.

    Bytes: one exponent a group, then two integers a byte, the first in the lower half. A value is
    its integer times 2^(exponent - 129), and zero where the exponent is zero. The exponent is the
    smallest at which the group's largest magnitude rounds to at most 7 or is cut by less than half
    a unit, so a value is off by at most half a unit: 2/15 of that magnitude.
    """

    id = 3
    name = "int4"
    group = 32
    last_exponent = 253
    """Larger ones could decode to infinity; what they would hold is cut, for error feedback."""

    def encoded_size(self, elements: int) -> int:
        """Return half a byte an element and one a group."""
        return _count_groups(elements, self.group) + -(-elements // 2)

    def encode(self, values: Float32) -> Bytes:
        """Return exponents and integers; the values are finite."""
        encoded = np.zeros(self.encoded_size(values.size), np.uint8)
        split = _count_groups(values.size, self.group)
        exponents, halves = encoded[:split], encoded[split:]
        piece = np.empty(min(_PIECE, values.size), np.float32)
        for start, stop, first, last in _iterate_chunks(values.size, self.group):
            part = piece[: stop - start]
            np.abs(values[start:stop], out=part)
            # The fraction's upper eighth rounds to 8 of 7: one exponent more.
            exponent = (_group_maxima(part, self.group).view(np.uint32) + (1 << 20)) >> 23
            exponent[exponent < 3] = 0  # the unit would be below the smallest normal number
            np.minimum(exponent, self.last_exponent, out=exponent)
            exponents[first:last] = exponent
            _times_group(values[start:stop], _INVERSE_UNITS[exponent], self.group, part)
            np.rint(part, out=part)
            np.clip(part, -7, 7, out=part)
            integers = part.astype(np.int8).view(np.uint8)
            integers &= 15
            packed = halves[start // 2 : start // 2 + -(-(stop - start) // 2)]
            packed[...] = integers[::2]
            packed[: (stop - start) // 2] |= integers[1::2] << 4
        return encoded

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Multiply every integer by its power of two.

        Raises:
            ProtocolError: the length or an exponent is wrong.
        """
        _check_length(self, encoded, out.size)
        split = _count_groups(out.size, self.group)
        exponents, halves = encoded[:split], encoded[split:]
        if exponents.size and exponents.max() > self.last_exponent:
            raise ProtocolError(f"int4: exponent {exponents.max()}, at most {self.last_exponent}")
        pairs = np.empty((min(_PIECE, out.size) + 1) // 2, np.uint64)
        for start, stop, first, last in _iterate_chunks(out.size, self.group):
            size = stop - start
            pair = pairs[: -(-size // 2)]
            # A byte is looked up as two fp32 in one 8-byte element; all indices are in range.
            _PAIRS.take(halves[start // 2 : start // 2 + pair.size], out=pair, mode="clip")
            part = out[start:stop]
            _times_group(pair.view(np.float32)[:size], _UNITS[exponents[first:last]], 32, part)


def _unit_table() -> tuple[Float32, Float32]:
    """Return the unit of each exponent, 2^(exponent - 129), and its inverse; zero below 3."""
    exponents = np.arange(256)
    used = exponents >= 3
    return (
        np.where(used, 2.0 ** (exponents - 129.0), 0).astype(np.float32),
        np.where(used, 2.0 ** (129.0 - exponents), 0).astype(np.float32),
    )


def _pair_table() -> NDArray[np.uint64]:
    """Return both integers of each byte as fp32, as the bits of one element."""
    halves = np.arange(256, dtype=np.uint8)
    signed = np.stack([halves & 15, halves >> 4], axis=1).astype(np.float32)
    signed[signed > 7] -= 16
    return signed.view(np.uint64)[:, 0].copy()


_UNITS, _INVERSE_UNITS = _unit_table()
_PAIRS = _pair_table()


def _check_length(codec: Int8 | Int4, encoded: Bytes, elements: int) -> None:
    """Compare a block's bytes with what the layout says.

    Raises:
        ProtocolError: they differ.
    """
    due = codec.encoded_size(elements)
    if encoded.size != due:
        raise ProtocolError(f"{codec.name}: block of {encoded.size} bytes, expected {due}")


def _count_groups(elements: int, group: int) -> int:
    return -(-elements // group)


def _iterate_chunks(elements: int, group: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield the elements and the groups of each piece, as start, stop, first, last."""
    for start in range(0, elements, _PIECE):
        stop = min(start + _PIECE, elements)
        yield start, stop, start // group, _count_groups(stop, group)


def _group_maxima(values: Float32, group: int) -> Float32:
    return np.maximum.reduceat(values, np.arange(0, values.size, group))


def _times_group(values: Float32, factors: Float32, group: int, out: Float32) -> None:
    """Multiply each group by its own factor."""
    whole = values.size // group
    body = whole * group
    np.multiply(
        values[:body].reshape(whole, group),
        factors[:whole, None],
        out=out[:body].reshape(whole, group),
    )
    if body < values.size:
        np.multiply(values[body:], factors[whole], out=out[body:])
