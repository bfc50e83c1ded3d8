"""Stored weights as fp32 in pieces, and bf16, which NumPy lacks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.model.safetensors_headers import TensorHeader

_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def stored_values(header: TensorHeader, step: int) -> Iterator[NDArray[np.float32]]:
    """Yield a stored tensor, flattened, as fp32 in pieces of `step` elements.

    The file is mapped, so that memory holds one piece.
    """
    stored = np.memmap(header.file, np.uint8, "r", header.begin, header.end - header.begin)
    values = stored.view(_STORED[header.dtype])
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        yield from_bf16(piece) if header.dtype == "BF16" else piece.astype(np.float32)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bf16 bit patterns, rounded to nearest even, as in torch."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
