"""PowerSGD: a matrix as the product of two thin ones (arXiv:1905.13727, algorithms 1 and 2).

The paper averages P over all workers before Q is computed, which takes two round trips. Here each
sender approximates its own matrix and the receiver adds the products: one trip, and no factor that
all members have to share, so workers come and go as with any other codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from trainer.exchange.protocol.codecs import Bytes, Float32
from trainer.exchange.protocol.compression.received import check_finite, check_length
from trainer.system.errors import ProtocolError

_PIECE = 64 * 1024
"""Elements of a product computed at a time."""
_LARGEST = np.finfo(np.float32).max / 2


@dataclass(frozen=True)
class _Part:
    """One tensor's place in a block's elements and in its bytes; `rank` 0: it travels whole."""

    first: int
    rows: int
    columns: int
    rank: int
    offset: int

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        return 2 * (self.rank * (self.rows + self.columns) if self.rank else self.elements)


class PowerSGD:
    """Rank-r factors of each matrix `[m, n]`, bf16: `[r, m]` orthonormal rows P, then `[r, n]` Q.

    The sender keeps Q as the start of its next power iteration. A vector, and a matrix that two
    factors would not shorten, travels as bf16.

    Args:
        rank: r.
        shapes: of each tensor of the block, in order; more than two dimensions are folded into two.
    """

    id = 5

    def __init__(self, rank: int, shapes: Sequence[tuple[int, ...]]) -> None:
        self.name = f"powersgd:{rank}"
        parts: list[_Part] = []
        first = offset = 0
        for shape in shapes:
            rows = shape[0] if len(shape) > 1 else 1
            columns = int(np.prod(shape)) // rows
            smaller = rank * (rows + columns) < rows * columns
            parts.append(_Part(first, rows, columns, rank if smaller else 0, offset))
            first, offset = first + parts[-1].elements, offset + parts[-1].nbytes
        self._parts = tuple(parts)
        self._elements, self._nbytes = first, offset
        self._started: dict[int, Float32] = {}
        """Q `[n, r]` of the last encoding, by the number of its tensor."""

    def nbytes(self, elements: int) -> int:
        """Return the bytes of the block, which has so many elements."""
        assert elements == self._elements, f"a block of {self._elements}, not {elements}"
        return self._nbytes

    def encode(self, block: int, values: Float32) -> Bytes:
        """Return the factors, one power iteration on from the last; squares must not overflow."""
        del block  # bound to one
        encoded = np.empty(self._nbytes, np.uint8)
        for number, part in enumerate(self._parts):
            matrix = values[part.first : part.first + part.elements]
            into = encoded[part.offset : part.offset + part.nbytes].view(bfloat16)
            if not part.rank:
                into[...] = matrix
                continue
            left, right = self._factors(number, part, matrix.reshape(part.rows, part.columns))
            into[: left.size] = left.T.ravel()
            into[left.size :] = right.T.ravel()
        return encoded

    def restart(self) -> None:
        """Restart the power iteration from its first vectors, as for a new sender."""
        self._started.clear()

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Write P^T Q of each matrix, term after term: the same bits on every CPU.

        Raises:
            ProtocolError: the length is wrong, or a number is not finite, or so large that a
                product could overflow; `out` is then undefined.
        """
        check_length(self.name, encoded, self.nbytes(out.size))
        check_finite(self.name, encoded)
        numbers = encoded.view(bfloat16)
        for part in self._parts:
            found = numbers[part.offset // 2 : (part.offset + part.nbytes) // 2].astype(np.float32)
            into = out[part.first : part.first + part.elements]
            if not part.rank:
                into[...] = found
                continue
            split = part.rank * part.rows
            left = found[:split].reshape(part.rank, part.rows)
            right = found[split:].reshape(part.rank, part.columns)
            if np.abs(left).max() > 1 or np.abs(right).max() > _LARGEST / part.rank:
                raise ProtocolError(f"{self.name}: a factor is too large")
            _multiply(left, right, into.reshape(part.rows, part.columns))

    def _factors(self, number: int, part: _Part, matrix: Float32) -> tuple[Float32, Float32]:
        start = self._started.get(number)
        if start is None or not start.any():  # as after a gradient of zeros
            draw = np.random.default_rng([part.rows, part.columns, number])
            start = draw.standard_normal((part.columns, part.rank), dtype=np.float32)
        scale = np.abs(start).max()
        left = np.linalg.qr(matrix @ (start / scale)).Q
        left = left.astype(bfloat16).astype(np.float32)  # what the receiver will have
        right = matrix.T @ left
        self._started[number] = right
        return left, right


def _multiply(left: Float32, right: Float32, out: NDArray[np.float32]) -> None:
    """Write left^T right, `[r, m]` and `[r, n]`, without BLAS, whose order of sums varies."""
    step = max(1, _PIECE // right.shape[1])
    scratch = np.empty((min(step, out.shape[0]), right.shape[1]), np.float32)
    for start in range(0, out.shape[0], step):
        into = out[start : start + step]
        product = scratch[: into.shape[0]]
        for index in range(left.shape[0]):
            column = left[index, start : start + step, None]
            if index == 0:
                np.multiply(column, right[index], out=into)
            else:
                np.multiply(column, right[index], out=product)
                np.add(into, product, out=into)
