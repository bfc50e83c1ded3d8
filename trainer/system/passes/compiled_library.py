"""The compiled passes, as functions of NumPy arrays.

`PASSES` is None where nothing was compiled; callers then do the same in NumPy. All arrays are
contiguous; no check of the values, shapes or types is made beyond asserts.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.system.passes.compiler import library_path

log = logging.getLogger(__name__)

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_ADDRESS, _COUNT, _FLOAT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float


class Passes:
    """The functions of passes.c, [n] each."""

    def __init__(self, path: Path) -> None:
        """Load a library.

        Raises:
            OSError: it is none for this machine.
            AttributeError: it lacks a function.
        """
        loaded = ctypes.CDLL(str(path))
        double = ctypes.c_double
        self._square_sum = _set_signature(loaded.square_sum, double, _ADDRESS, _COUNT)
        self._encode = _set_signature(loaded.bf16_encode, None, _ADDRESS, _ADDRESS, _COUNT)
        self._bf16_square_sum = _set_signature(loaded.bf16_square_sum, double, _ADDRESS, _COUNT)
        average = (_ADDRESS, _COUNT, _FLOAT, _ADDRESS, _COUNT)
        self._average = _set_signature(loaded.bf16_average, double, *average)
        self._adamw = _set_signature(loaded.adamw, None, *[_ADDRESS] * 4, _COUNT, *[_FLOAT] * 9)

    def square_sum(self, values: Float32) -> float:
        """Return the sum of squares in double precision."""
        return self._square_sum(_data_address(values, np.float32), values.size)

    def bf16_encode(self, values: Float32) -> Bytes:
        """Return the values as bf16, rounded to nearest even."""
        out = np.empty(2 * values.size, np.uint8)
        self._encode(_data_address(values, np.float32), _data_address(out, np.uint8), values.size)
        return out

    def bf16_square_sum(self, encoded: Bytes) -> float:
        """Return the sum of the squares of bf16 values in double precision."""
        return self._bf16_square_sum(_data_address(encoded, np.uint8), encoded.size // 2)

    def bf16_average(self, parts: Sequence[Bytes], divisor: float) -> tuple[Bytes, float]:
        """Return the average of bf16 vectors as bf16, and the sum of its squares.

        They are decoded, added in fp32 in this order, divided by the divisor, and encoded.
        """
        addresses = (_ADDRESS * len(parts))(*(_data_address(part, np.uint8) for part in parts))
        out = np.empty(parts[0].size, np.uint8)
        assert all(part.size == out.size for part in parts)
        to = _data_address(out, np.uint8)
        squares = self._average(addresses, len(parts), divisor, to, out.size // 2)
        return out, squares

    def adamw(
        self,
        vectors: tuple[Float32, Float32, Float32, Float32],
        clip: np.float32,
        moments: tuple[np.float32, np.float32, np.float32, np.float32],
        decay: np.float32,
        step_size: np.float32,
        correction: np.float32,
        epsilon: np.float32,
    ) -> None:
        """Move weights and both moments in place by one update of AdamW.

        Args:
            vectors: weights, gradient, first and second moment.
            clip: factor of the gradient.
            moments: beta1, 1 - beta1, beta2, 1 - beta2.
            decay: factor of the weights before the update.
            step_size, correction, epsilon: as in `trainer.optimizer.adamw`.
        """
        size = vectors[0].size
        assert all(vector.size == size for vector in vectors)
        addresses = (_data_address(vector, np.float32) for vector in vectors)
        self._adamw(*addresses, size, clip, *moments, decay, step_size, correction, epsilon)


def load_passes(path: Path) -> Passes | None:
    """Return the passes of a library; None if it is not there or cannot be used."""
    if not path.is_file():
        return None
    try:
        return Passes(path)
    except (OSError, AttributeError) as error:
        log.warning("%s: %s: NumPy runs the passes over gradients", path, error)
        return None


def _set_signature(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _data_address(array: NDArray[Any], kind: type[np.generic]) -> int:
    """Return where an array lies; bytes hold values of two bytes."""
    assert array.dtype == kind, array.dtype
    assert array.flags.c_contiguous
    address = array.ctypes.data
    assert address % max(array.itemsize, 2) == 0, address
    return address


PASSES = load_passes(library_path())
