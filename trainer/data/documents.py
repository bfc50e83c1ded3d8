"""A corpus: numbered texts, the same on every machine with the same files.

A file is one document, and so is a line of a `*.jsonl` file. Folders are read recursively, sorted
by name; files that are hidden, empty or not text are left out and counted. Only the documents'
positions are kept in memory.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from trainer.data.records import DataError
from trainer.data.samples import iterate, read_line
from trainer.data.shapes import Sample, UnusedKeys
from trainer.system.errors import InputError

log = logging.getLogger(__name__)

LINES = ".jsonl"


class Documents(Sequence[Sample]):
    """Numbered documents, read on demand.

    Args:
        paths: files and folders; their order is the order of the documents.

    Raises:
        DataError: lines of a `*.jsonl` file are bad; all are counted, the first ones named.
        InputError: a path is missing, a named file is not text, or nothing is left.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.left_out: Counter[str] = Counter()
        """Files below the folders that are not documents, by reason: `hidden`, `empty`,
        `not text`."""
        self._files: list[Path] = []
        self._file = array("q")  # of each document: the number of its file,
        self._begin = array("q")  # where its line begins in bytes,
        self._line = array("q")  # the line's number; 0: the whole file,
        self._marks = array("Q")  # and the first bytes of its digest
        hasher = blake3()
        for path in paths:
            if path.is_dir():
                for file in self._below(path):
                    self._add(file, hasher, named=False)
            elif path.is_file():
                self._add(path, hasher, named=True)
            else:
                raise InputError(f"{path}: no such data file or folder")
        if not self._file:
            names = ", ".join(map(str, paths))
            raise InputError(f"{names}: no text files and no JSON Lines to read")
        self.digest = hasher.hexdigest()
        """BLAKE3 hex over the digests of the documents in their order; names do not count."""

    def __len__(self) -> int:
        return len(self._file)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        """Read one document.

        Raises:
            InputError: it has changed since it was hashed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        path, line = self._files[self._file[index]], self._line[index]
        try:
            sample = read_line(path, self._begin[index], line) if line else Sample(_read_text(path))
        except (DataError, _NoDocumentError):
            sample = None
        if sample is None or sample.digest()[:8] != self._marks[index].to_bytes(8, "little"):
            raise InputError(f"{self.source(index)}: has changed since it was first read")
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def source(self, index: int) -> str:
        """Return a document's place, as `file` or `file:line`."""
        path, line = self._files[self._file[index]], self._line[index]
        return f"{path}:{line}" if line else str(path)

    def _below(self, folder: Path) -> Iterator[Path]:
        """Yield the visible files of a folder, in the order of their names as bytes."""
        for parent, folders, files in os.walk(folder):
            hidden = [name for name in (*folders, *files) if name.startswith(".")]
            self.left_out["hidden"] += len(hidden)
            folders[:] = sorted((name for name in folders if name[0] != "."), key=os.fsencode)
            for name in sorted((name for name in files if name[0] != "."), key=os.fsencode):
                path = Path(parent, name)
                if path.is_file():  # no sockets, no broken links
                    yield path

    def _add(self, path: Path, hasher: blake3, *, named: bool) -> None:
        self._files.append(path)
        if path.suffix == LINES:
            unused = UnusedKeys()
            for begin, sample in iterate(path, None, unused):
                self._append(sample, begin, hasher)
            for line in unused.report():
                log.info("%s: %s", path, line)
            return
        try:
            self._append(Sample(_read_text(path)), 0, hasher)
        except _NoDocumentError as error:
            if named:
                raise InputError(f"{path}: {error}") from None
            self.left_out[str(error)] += 1

    def _append(self, sample: Sample, begin: int, hasher: blake3) -> None:
        digest = sample.digest()
        hasher.update(digest)
        self._file.append(len(self._files) - 1)
        self._begin.append(begin)
        self._line.append(sample.line)
        self._marks.append(int.from_bytes(digest[:8], "little"))


class _NoDocumentError(Exception):
    """Why a file is not a document."""


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if b"\0" in content:  # valid UTF-8, but no text has it
        raise _NoDocumentError("not text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NoDocumentError("not text") from None
    if not text.strip():
        raise _NoDocumentError("empty")
    return text
