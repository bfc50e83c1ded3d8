"""A file whose parts are read while a model computes."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from trainer.model.safetensors_headers import TensorHeader
from trainer.system.errors import InputError, plain_reason
from trainer.system.regular_file import open_file
from trainer.system.storage.cache_folder import damage_remedy


class StoredFile:
    """An open file, read by offset, so that what happens to it is an error and never a fault.

    Raises:
        InputError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            file = open_file(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {plain_reason(error)}") from None
        self.close = weakref.finalize(self, file.close)
        """Closes the file, which nothing reads any more."""
        self._descriptor = file.fileno()
        self._stamp = _file_identity(os.fstat(self._descriptor))

    def fill(self, memory: memoryview, begin: int, part: str) -> None:
        """Read as many bytes as `memory` has.

        Args:
            begin: where they lie in the file.
            part: names them in errors.

        Raises:
            InputError: the file is truncated, or its disk fails.
        """
        done = 0
        try:
            while done < len(memory):
                count = os.preadv(self._descriptor, [memory[done:]], begin + done)
                if count == 0:
                    raise EOFError(f"the file is truncated, {damage_remedy(self._path)}")
                done += count
        except (OSError, EOFError) as error:
            raise self._refuse(part, error) from None

    def check_unchanged(self, part: str) -> None:
        """Check that what was read is of the file that was opened.

        Raises:
            InputError: it was changed or replaced since.
        """
        try:
            intact = _file_identity(self._path.stat()) == self._stamp
        except OSError as error:
            raise self._refuse(part, error) from None
        if not intact:
            raise InputError(
                f"{self._path}: changed or replaced while {part} was read; start the worker again"
            )

    def _refuse(self, part: str, error: OSError | EOFError) -> InputError:
        return InputError(f"{self._path}: {part} cannot be read: {plain_reason(error)}")


class StoredTable:
    """A tensor `[rows, ...]` in its file, such as an embedding, of which rows are read.

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


def _file_identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
