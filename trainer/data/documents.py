"""A corpus: numbered texts, the same on every machine with the same files.

A record of a data file is one document, in every format that training reads; any other text is one
as a whole. A folder with data files is read as training reads it. Of another folder each text file
is a document, in the order of the paths. Only the documents' positions are kept in memory: in JSON
Lines, or in a temporary copy of what has no lines to find.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from blake3 import blake3

from trainer.data.formats import has_records, is_json_lines
from trainer.data.records import parse_line
from trainer.data.samples import iter_samples
from trainer.data.selection import PACKED, put_aside
from trainer.data.shapes import KEYS, KeyCounts, Sample, parse_sample
from trainer.data.sources import find_data, find_texts
from trainer.data.values import BadLineError
from trainer.system.errors import InputError, convert_read_errors
from trainer.system.process.slow_log import log_if_slow
from trainer.system.regular_file import open_file, read_file
from trainer.system.storage.progress import report_progress

log = logging.getLogger(__name__)

_LONGEST_TEXT = 1 << 30
"""Bytes of a text that is one document."""


class Documents(Sequence[Sample]):
    """Numbered documents, read on demand.

    Args:
        paths: files, folders and data sets of the hub; their order is that of the documents.
            None: no documents.
        columns: our name of a record's key to the data's, as `data.columns`.

    Raises:
        DataError: records are bad; all of a file are counted, the first ones named.
        InputError: a path is missing, a named file is not text, or nothing is left.
    """

    def __init__(self, paths: Sequence[Path], columns: Mapping[str, str] | None = None) -> None:
        self.left_out: Counter[str] = Counter()
        """Files below folders of texts that are not documents, by reason: `hidden`, `empty`,
        `not text`."""
        self._columns = columns
        self._copy = tempfile.TemporaryFile()  # noqa: SIM115  # unlinked: a killed one leaves none
        weakref.finalize(self, self._copy.close)
        self._places: list[tuple[Path | None, str]] = []
        """A file, None for the copy; and what precedes the number of its records in messages."""
        self._place = array("q")  # of each document: the number of its place,
        self._begin = array("q")  # its first byte there,
        self._size = array("q")  # its bytes,
        self._line = array("q")  # its number there; 0: the whole file,
        self._marks = array("Q")  # and the first bytes of its digest
        hasher = blake3()
        for path in paths:
            with (
                log_if_slow(f"reading {path}"),
                report_progress(f"reading {path.name}") as progress,
            ):
                self._progress = progress
                self._read(path, hasher)
        if not self._place and paths:
            names = ", ".join(map(str, paths))
            raise InputError(f"{names}: no documents: every file is empty or not text")
        self._copy.flush()
        self.digest = hasher.hexdigest()
        """BLAKE3 hex over the digests of the documents in their order; names do not count."""

    def __len__(self) -> int:
        return len(self._place)

    def __getitem__(self, index: int) -> Sample:  # pyright: ignore[reportIncompatibleMethodOverride]  # no slices
        """Read one document.

        Raises:
            InputError: it has changed since it was hashed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        path, line = self._places[self._place[index]][0], self._line[index]
        try:
            if line:
                sample = parse_sample(parse_line(self._read_line(index)), line)
            else:
                assert path is not None, "a text is never copied"
                sample = _read_text(path)
        except (BadLineError, _NoDocumentError):
            sample = None
        if sample is None or sample.digest()[:8] != self._marks[index].to_bytes(8, "little"):
            raise InputError(
                f"{self.describe_location(index)}: has changed since it was first read"
            )
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def describe_location(self, index: int) -> str:
        """Return a document's place, as `file`, `file:line` or `file: row N`."""
        line = self._line[index]
        return self._places[self._place[index]][1] + (str(line) if line else "")

    def _read_line(self, index: int) -> bytes:
        """Return the line of a document."""
        path = self._places[self._place[index]][0]
        begin, size = self._begin[index], self._size[index]
        if path is None:
            return os.pread(self._copy.fileno(), size, begin)
        with convert_read_errors(path, InputError), open_file(path) as file:
            file.seek(begin)
            return file.read(size)

    def _read(self, path: Path, hasher: blake3) -> None:
        texts = find_texts(path) if path.is_dir() else None
        if texts is not None:
            for file in texts.files:
                try:
                    self._append_text(file, file, hasher)
                except _NoDocumentError as error:
                    put_aside(texts.left_out, str(error), [str(file.relative_to(path))])
            self.left_out.update({reason: len(each) for reason, each in texts.left_out.items()})
            if note := texts.describe(path):
                log.info(note)
            return
        found = find_data(path)
        if note := found.describe(path):
            log.info(note)
        for file in found.files:
            named = path if found.piped else file
            if has_records(file, named.name):
                self._append_records(file, named, hasher)
                continue
            try:
                self._append_text(file, named, hasher)
            except _NoDocumentError as error:
                packed = "; unpack it" if file.suffix.lower() in PACKED else ""
                raise InputError(f"{named}: {error}{packed}") from None

    def _append_text(self, file: Path, named: Path, hasher: blake3) -> None:
        sample = _read_text(file)
        self._places.append((file, str(named)))
        self._append(sample, 0, 0, hasher)

    def _append_records(self, file: Path, named: Path, hasher: blake3) -> None:
        """Append each record; only a line of JSON can be found again by its first byte."""
        there = file if is_json_lines(file) and not self._columns else None
        unused, last = KeyCounts(), None
        for record, sample in iter_samples(named, None, unused, self._columns):
            if record.source != last:
                last = record.source
                self._places.append((there, last))
            begin, size = record.begin, record.size
            if there is None:
                tree = {key: value for key, value in record.tree.items() if key in KEYS}
                begin = self._copy.tell()
                size = self._copy.write(json.dumps(tree, ensure_ascii=False).encode())
            self._append(sample, begin, size, hasher)
        for line in unused.report():
            log.info("%s: %s", named, line)

    def _append(self, sample: Sample, begin: int, size: int, hasher: blake3) -> None:
        self._progress.advance()
        digest = sample.digest()
        hasher.update(digest)
        self._place.append(len(self._places) - 1)
        self._begin.append(begin)
        self._size.append(size)
        self._line.append(sample.line)
        self._marks.append(int.from_bytes(digest[:8], "little"))


class _NoDocumentError(Exception):
    """Why a file is not a document."""


def _read_text(path: Path) -> Sample:
    with convert_read_errors(path, InputError):
        content = read_file(path, _LONGEST_TEXT)
    if b"\0" in content:  # valid UTF-8, but no text has it
        raise _NoDocumentError("not text")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _NoDocumentError("not text") from None
    if not text.strip():
        raise _NoDocumentError("empty")
    return Sample(text)
