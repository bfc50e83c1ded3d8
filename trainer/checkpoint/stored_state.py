"""The weights and moments in a checkpoint folder, read in pieces."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.model.safetensors_headers import read_file_headers
from trainer.system.errors import InputError, StorageError, convert_read_errors
from trainer.system.regular_file import open_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from trainer.model.layout import GradientLayout, TensorSlot
    from trainer.optimizer.adamw import Vector

OPTIMIZER_FILE = "optimizer.safetensors"
_BYTES = 4


class StoredState:
    """The vectors stored in a folder, read on demand.

    Files are read, not mapped: accessing a mapped page that a file server has lost raises SIGBUS.

    Args:
        weights: the file with a tensor for each of the layout's.
        optimizer: the file with both moments, each fp32 `[layout.size]`.

    Raises:
        StorageError: a tensor is missing or has another shape.
    """

    def __init__(self, weights: Path, optimizer: Path, layout: GradientLayout) -> None:
        self._layout = layout
        self._files: dict[Vector, Path] = {
            "weights": weights,
            "first_moment": optimizer,
            "second_moment": optimizer,
        }
        flat = (layout.size,)
        moments = {"first_moment": flat, "second_moment": flat}
        shapes = {slot.name: slot.shape for slot in layout.iter_tensors()}
        self._begins = _read_offsets(weights, shapes) | _read_offsets(optimizer, moments)

    def read_slice(
        self, vector: Vector, slot: TensorSlot, first: int, target: NDArray[np.float32]
    ) -> None:
        """Fill contiguous fp32 `[n]` with a tensor's elements from `first` on.

        Raises:
            StorageError: the file cannot be read.
        """
        begin = self._begins[slot.name if vector == "weights" else vector]
        element = first if vector == "weights" else slot.start + first
        path = self._files[vector]
        with convert_read_errors(path, StorageError), open_file(path) as file:
            _read_into(file.fileno(), path, begin + _BYTES * element, target)

    def read_vector(self, vector: Vector) -> NDArray[np.float32]:
        """Return a vector, fp32 `[layout.size]`.

        Raises:
            StorageError: the file cannot be read.
        """
        flat = np.empty(self._layout.size, np.float32)
        for slot in self._layout.iter_tensors():
            self.read_slice(vector, slot, 0, flat[slot.start : slot.stop])
        return flat


def _read_offsets(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return where each fp32 tensor begins in a file."""
    try:
        headers = read_file_headers(path)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except InputError as error:
        raise StorageError(str(error)) from None
    for name, shape in shapes.items():
        header = headers.get(name)
        if header is None or header.dtype != "F32" or header.shape != shape:
            raise StorageError(f"{path}: tensor {name} is missing or has another shape")
    return {name: headers[name].begin for name in shapes}


def _read_into(descriptor: int, path: Path, offset: int, target: NDArray[np.float32]) -> None:
    memory = target.view(np.uint8).data
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise StorageError(f"{path}: is truncated")
        memory, offset = memory[count:], offset + count
    if sys.byteorder == "big":
        target.byteswap(inplace=True)
