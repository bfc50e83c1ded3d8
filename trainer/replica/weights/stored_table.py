"""A table of which rows are read, such as the embedding of a vocabulary."""

from __future__ import annotations

import numpy as np

from trainer.model.safetensors_headers import TensorHeader
from trainer.replica.weights.stored_file import StoredFile


class StoredTable:
    """A tensor `[rows, ...]` in its file.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, header: TensorHeader, name: str) -> None:
        self._file = StoredFile(header.file)
        self._name, self._begin, self._rows = name, header.begin, header.shape[0]
        self._row_bytes = (header.end - header.begin) // header.shape[0]

    def read_rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows of these numbers `[n]` as they are stored, u8 `[n, bytes of a row]`.

        Raises:
            InputError: the file is truncated, was changed or replaced, or its disk fails.
        """
        assert not len(numbers) or 0 <= numbers.min() <= numbers.max() < self._rows, self._name
        found = np.empty((len(numbers), self._row_bytes), np.uint8)
        for row, number in zip(found, numbers.tolist(), strict=True):
            self._file.fill(row.data, self._begin + number * self._row_bytes, self._name)
        self._file.check_unchanged(self._name)
        return found
