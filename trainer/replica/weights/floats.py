"""Stored weights as fp32 in pieces, and bf16, which NumPy lacks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.model.safetensors_headers import TensorHeader
from trainer.replica.weights.stored_file import StoredFile

_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def stored_values(header: TensorHeader, step: int) -> Iterator[NDArray[np.float32]]:
    """Yield a stored tensor, flattened, as fp32 in pieces of `step` elements.

    Memory holds one piece, and the process maps nothing of the file.

    Raises:
        InputError: the file is truncated, or its disk fails.
    """
    file, dtype = StoredFile(header.file), np.dtype(_STORED[header.dtype])
    memory = np.empty(min(step, math.prod(header.shape)) * dtype.itemsize, np.uint8)
    for begin in range(header.begin, header.end, max(1, memory.size)):
        raw = memory[: header.end - begin]
        file.fill(raw.data, begin, "a weight")
        yield convert_stored(raw, header.dtype)
    file.close()


def convert_stored(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Return the fp32 values of stored bytes."""
    values = raw.view(_STORED[dtype])
    return from_bf16(values) if dtype == "BF16" else values.astype(np.float32)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of bf16 bit patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return bf16 bit patterns, rounded to nearest even, as in torch."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
