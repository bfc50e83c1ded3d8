"""Codecs: how a block of fp32 gradients travels as bytes.

A codec turns one whole block into bytes and back, and keeps nothing of it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from trainer.system.passes import compiled

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


class Codec(Protocol):
    """A way to write `[n]` fp32 values as bytes; `id` is its number on the wire."""

    id: int
    name: str

    def nbytes(self, elements: int) -> int:
        """Return the encoded size of a block of so many elements."""
        ...

    def encode(self, values: Float32) -> Bytes:
        """Return the block as bytes; NaN and Inf stay NaN and Inf."""
        ...

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Write the decoded block into `out`."""
        ...


class Fp32:
    """Little-endian IEEE 754 binary32: exact."""

    id = 0
    name = "fp32"

    def nbytes(self, elements: int) -> int:
        """Return 4 bytes an element."""
        return 4 * elements

    def encode(self, values: Float32) -> Bytes:
        """Return a copy of the bits."""
        return values.astype("<f4").view(np.uint8)

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Copy the bits, unless they are there."""
        if encoded.ctypes.data != out.ctypes.data:
            out[...] = encoded.view("<f4")


class Bf16:
    """bfloat16: the upper half of an fp32, rounded to nearest even."""

    id = 1
    name = "bf16"

    def nbytes(self, elements: int) -> int:
        """Return 2 bytes an element."""
        return 2 * elements

    def encode(self, values: Float32) -> Bytes:
        """Return the rounded upper halves."""
        if compiled.PASSES:
            return compiled.PASSES.bf16_encode(values)
        with np.errstate(over="ignore", invalid="ignore"):  # the check of the gradient reports it
            return values.astype(bfloat16).view(np.uint8)

    def decode(self, encoded: Bytes, out: Float32) -> None:
        """Put the halves back on top of zeros."""
        out[...] = encoded.view(bfloat16)
