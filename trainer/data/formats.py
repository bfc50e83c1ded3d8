"""Data files of many formats, read as records. Its first bytes tell what a file is.

| format | read as |
|---|---|
| JSON Lines, a JSON array of objects | its objects |
| CSV, TSV, also with semicolons | its rows, by the names of the header |
| Parquet, Arrow | its rows, by pyarrow |
| plain text: `.txt`, `.md` | its paragraphs |
| gzip, bzip2, xz, zstd, ZIP | what is in it |
| UTF-16, UTF-32 | the same as in UTF-8 |
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import logging
import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from trainer.data import arrow, records
from trainer.data.records import Problems, Record
from trainer.data.selection import RECORDS, TEXTS, choose_files, file_suffix
from trainer.data.shapes import LABELLED_KEYS, LINE_KEYS, PAIR_KEYS
from trainer.data.sources import DataFiles, find_data
from trainer.data.tables import read_table
from trainer.system.errors import InputError
from trainer.system.regular_file import open_file
from trainer.system.storage.progress import read_chunks

log = logging.getLogger(__name__)

HEAD_BYTES = 4096
"""Bytes that decide on the format; a shorter head is a whole file."""
_TABLES = frozenset((".csv", ".tsv"))
KEYS = LINE_KEYS.used | LABELLED_KEYS.used | PAIR_KEYS.used
"""The keys that `data.columns` can name."""
_DELIMITERS = "\t;,|"
_MOST_NESTED = 3
"""Archives in archives."""

_MARK = b"\xef\xbb\xbf"
_ENCODINGS = {  # the longer marks first: UTF-32's begins with UTF-16's
    b"\xff\xfe\0\0": "utf-32",
    b"\0\0\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
    b"{\0": "utf-16-le",
    b"\0{": "utf-16-be",
}
_OF_PYARROW = {
    b"PAR1": ("Parquet", arrow.parquet_rows),
    b"ARROW1": ("Arrow", arrow.arrow_rows),
    b"\xff\xff\xff\xff": ("Arrow", arrow.arrow_rows),
}
_ZIP = b"PK\x03\x04"
_PACKERS: dict[bytes, Callable[[BinaryIO, str], Any]] = {
    b"\x1f\x8b": lambda stream, _: gzip.GzipFile(fileobj=stream),
    b"BZh": lambda stream, _: bz2.BZ2File(stream),
    b"\xfd7zXZ\0": lambda stream, place: _Unpacked(_Xz(stream, place).read),
    b"\x28\xb5\x2f\xfd": lambda stream, place: _import_pyarrow(place, "zstd").CompressedInputStream(
        stream, "zstd"
    ),
}
"""Functions that open a compressed stream, by its first bytes; the second argument names it."""
_XZ_MEMORY = 128 << 20
_PAGE = "a web page, not the data itself; download the file behind it"
_PICKLE = "a pickle, which can run code; save its data as Parquet or JSON Lines"
_REFUSED = {
    b"SQLite format 3\0": "an SQLite database; export its table as CSV",
    b"%PDF": "a PDF; extract its text",
    b"\x89HDF": "HDF5; save its data as Parquet",
    b"version https://git-lfs": "a Git LFS pointer, not the data itself; fetch it: git lfs pull",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"Rar!": "a RAR archive; unpack it",
    b"<!DOCTYPE html": _PAGE,
    b"<!doctype html": _PAGE,
    b"<html": _PAGE,
    **{bytes((0x80, protocol)): _PICKLE for protocol in range(2, 6)},
}
"""Names of other kinds of files with a remedy, by their first bytes."""


def read_records(
    path: Path, problems: Problems, columns: Mapping[str, str] | None = None
) -> Iterator[Record]:
    """Yield the records of a data file in their order, holding one at a time.

    Args:
        problems: receives the records that cannot be read; the caller adds those that are not
            samples, and calls `problems.check()` at the end.
        columns: our name of a key to the file's. The others are not read.

    Raises:
        InputError: the file cannot be read, is of a format that is not read, was cut, or changed
            while it was read; or lacks a column.
    """
    found = find_data(path)
    for file in found.files:
        yield from _read_file(file, path if found.piped else file, columns or {}, problems)


def _read_file(
    file: Path, path: Path, columns: Mapping[str, str], problems: Problems
) -> Iterator[Record]:
    """Yield the records of one file; errors call it `path`."""
    try:
        with open_file(file) as stream, _check_unchanged(file, stream):
            yield from _read_any(stream, str(path), path.name, columns, problems)
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, UnicodeError) as error:
        raise InputError(f"{path}: is truncated or damaged: {error}; copy it again") from None
    except OSError as error:
        if error.errno is None:  # of a decompressor
            raise InputError(f"{path}: is truncated or damaged: {error}; copy it again") from None
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def count_records(path: Path, columns: Mapping[str, str] | None = None) -> int:
    """Return how many records data has, bad ones counted as well where lines can be counted.

    Raises:
        InputError: see `read_records`.
    """
    files = find_data(path).files
    if len(files) == 1 and is_json_lines(files[0]):
        with open_file(files[0]) as file:
            return sum(1 for line in file if line.strip())
    return sum(1 for _ in read_records(path, Problems(), columns))


def count_lines(path: Path) -> int | None:
    """Return how many lines JSON Lines have; None for data of another format.

    Raises:
        InputError: there is no data.
    """
    try:
        found = find_data(path)
        if found.piped or not all(map(is_json_lines, found.files)):
            return None
        lines = 0
        for each in found.files:
            for piece in read_chunks(each, "counting the lines of"):
                lines += piece.count(b"\n")
        return lines
    except OSError:
        return None  # its reader reports it


def is_json_lines(path: Path) -> bool:
    """Whether a file is JSON Lines as they are, in which a line can be found by its first byte.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(path) as stream:
        head = stream.peek(HEAD_BYTES)
    return head.removeprefix(_MARK).lstrip().startswith(b"{") and not head.startswith(b"{\0")


def has_records(path: Path, name: str) -> bool:
    """Whether a file has records, by the suffix of its name or else by its first bytes.

    Any other file is a text as a whole.

    Raises:
        OSError: it cannot be read.
    """
    if kind := file_suffix(name):
        return kind in RECORDS
    with open_file(path) as stream:
        head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    text = head.removeprefix(_MARK).lstrip()
    return (
        head.startswith((_ZIP, *_PACKERS, *_OF_PYARROW, *_ENCODINGS))
        or text.startswith(b"{")
        or _is_array(text)
        or _find_delimiter(name, text, {}) is not None
    )


def _is_array(text: bytes) -> bool:
    return text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]", b"")


@contextmanager
def _check_unchanged(path: Path, stream: BinaryIO) -> Iterator[None]:
    """Check that a file is the same at the end: a half of each of two files is neither."""

    def get_identity(found: os.stat_result) -> tuple[int, ...]:
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    before = get_identity(os.fstat(stream.fileno()))
    yield
    try:
        same = get_identity(path.stat()) == before
    except FileNotFoundError:
        same = False
    if not same:
        raise InputError(
            f"{path}: was changed, replaced or removed while it was read; read it again"
        )


def _read_any(
    stream: io.BufferedReader[Any],
    place: str,
    name: str,
    columns: Mapping[str, str],
    problems: Problems,
    nested: int = 0,
) -> Iterator[Record]:
    """Yield the records of a stream.

    Args:
        place: names it in messages.
        name: a file's name without what packing has added, for its suffix.
        nested: how many archives it is in.
    """
    head = stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    if nested > _MOST_NESTED:
        raise InputError(f"{place}: is packed more than {_MOST_NESTED} times; unpack it")
    if head.startswith(_ZIP):
        yield from _read_zip(stream, place, columns, problems, nested)
        return
    if inner := _open_unpacked(head, stream, place):
        stem = name if isinstance(inner, _Recoded) else name.removesuffix(PurePath(name).suffix)
        buffered = io.BufferedReader(inner, records.PIECE)
        yield from _read_any(buffered, place, stem, columns, problems, nested + 1)
        return
    for first, (what, rows) in _OF_PYARROW.items():
        if head.startswith(first):
            pa = _import_pyarrow(place, what)
            with _make_seekable(stream, place) as whole:
                yield from rows(pa, whole, place, columns)
            return
    for first, what in _REFUSED.items():
        if head.startswith(first):
            raise InputError(f"{place}: is {what}")
    if head[257:262] == b"ustar":
        raise InputError(f"{place}: is a tar archive; unpack it")
    begin = stream.readinto(bytearray(len(_MARK))) if head.startswith(_MARK) else 0
    text, source = head[begin:].lstrip(), f"{place}:"
    if _is_array(text):
        elements = records.read_json_array(stream, f"{place}: element ", problems)
        yield from records.rename_keys(elements, columns, problems)
    elif text.startswith(b"{"):
        if text.split(b"\n", 1)[0].strip() == b"{":
            raise InputError(
                f"{place}: has objects of several lines, expected one a line or an array of them:"
                f" jq -c . FILE > NEW"
            )
        lines = records.read_json_lines(stream, source, begin, problems)
        yield from records.rename_keys(lines, columns, problems)
    elif PurePath(name).suffix.lower() in TEXTS:
        yield from records.read_paragraphs(stream, source, problems)
    elif delimiter := _find_delimiter(name, text, columns):
        yield from read_table(stream, source, delimiter, columns, problems)
    else:
        yield from records.read_json_lines(stream, source, begin, problems)


def _read_zip(
    stream: io.BufferedReader[Any],
    place: str,
    columns: Mapping[str, str],
    problems: Problems,
    nested: int,
) -> Iterator[Record]:
    """Yield the records of a ZIP archive: of its one file, or of those that a folder's data are."""
    with _make_seekable(stream, place) as whole, zipfile.ZipFile(whole) as archive:
        names = sorted(entry.filename for entry in archive.infolist() if not entry.is_dir())
        if "[Content_Types].xml" in names:
            raise InputError(f"{place}: is an office document; save its table as CSV in UTF-8")
        hidden = (".", "__MACOSX")
        seen = [n for n in names if not any(p.startswith(hidden) for p in PurePath(n).parts)]
        if len(seen) > 1:
            found, left_out = choose_files(place, seen)
            _log_once(DataFiles([*map(Path, found)], left_out=left_out).describe(Path(place)))
            seen = found
        for name in seen:
            try:
                if archive.getinfo(name).compress_type == zipfile.ZIP_LZMA:  # without a limit
                    raise NotImplementedError("it is packed with LZMA, whose memory has no limit")
                member = archive.open(name)
            except (RuntimeError, NotImplementedError) as error:  # encrypted, other methods
                raise InputError(f"{place}/{name}: cannot be unpacked: {error}") from None
            with member:
                inner = io.BufferedReader(_Unpacked(member.read), records.PIECE)
                yield from _read_any(inner, f"{place}/{name}", name, columns, problems, nested + 1)


@cache
def _log_once(line: str | None) -> None:
    """Log a line, once however often the data is read."""
    log.info(line)


@contextmanager
def _make_seekable(stream: io.BufferedReader[Any], place: str) -> Iterator[BinaryIO]:
    """Provide a stream that can be read from its end, in a temporary file if need be."""
    if stream.seekable():
        yield stream
        return
    with tempfile.TemporaryFile() as copy:
        room = shutil.disk_usage(tempfile.gettempdir()).free // 2
        while piece := stream.read(1 << 20):
            if copy.tell() > room:
                raise InputError(
                    f"{place}: takes more than half of the space in {tempfile.gettempdir()} when"
                    " unpacked; unpack it yourself, or set TMPDIR"
                )
            copy.write(piece)
        copy.seek(0)
        yield copy


class _Xz:
    """The bytes of an xz file, which may ask for as much memory as `xz -9` needs, twice.

    lzma's own file has no such limit: some kilobytes may ask for 4 GiB.
    """

    def __init__(self, stream: BinaryIO, place: str) -> None:
        self._stream, self._place = stream, place
        self._decoder = self._begin()

    def read(self, size: int) -> bytes:
        """Return at most so many bytes; none at the end."""
        found = b""
        while not found:
            packed = b""
            if self._decoder.eof:  # another stream may follow, after zeros
                packed = self._decoder.unused_data.lstrip(b"\0")
                while not packed:
                    if not (piece := self._stream.read(records.PIECE)):
                        return b""
                    packed = piece.lstrip(b"\0")
                self._decoder = self._begin()
            elif self._decoder.needs_input and not (packed := self._stream.read(records.PIECE)):
                raise EOFError("it ends within a stream of xz")
            try:
                found = self._decoder.decompress(packed, size)
            except lzma.LZMAError as error:
                if "limit" not in str(error):
                    raise
                raise InputError(
                    f"{self._place}: needs more than {_XZ_MEMORY >> 20} MiB to be unpacked; pack it"
                    " with `xz -9` or less"
                ) from None
        return found

    @staticmethod
    def _begin() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


class _Unpacked(io.RawIOBase):
    """The bytes that a function returns, in full buffers."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._source = read
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        view, size = memoryview(buffer), 0
        while size < len(view):
            piece = self._rest or self._source(len(view) - size)
            if not piece:
                break
            part = piece[: len(view) - size]
            view[size : size + len(part)] = part
            self._rest = piece[len(part) :]
            size += len(part)
        return size


class _Recoded(_Unpacked):
    """Text of another encoding in UTF-8."""

    def __init__(self, stream: io.BufferedReader[Any], encoding: str) -> None:
        decoder = codecs.getincrementaldecoder(encoding)()

        def read(size: int) -> bytes:
            while True:
                raw = stream.read(size)
                text = decoder.decode(raw, final=not raw)
                if text or not raw:
                    return text.encode()

        super().__init__(read)


def _open_unpacked(head: bytes, stream: io.BufferedReader[Any], place: str) -> _Unpacked | None:
    """Return what is in a packed stream, or a text in UTF-8; None if it is neither."""
    for first, opened in _PACKERS.items():
        if head.startswith(first):
            return _Unpacked(opened(stream, place).read)
    for mark, encoding in _ENCODINGS.items():
        if head.startswith(mark):
            return _Recoded(stream, encoding)
    return None


def _import_pyarrow(place: str, what: str) -> Any:
    """Return the module pyarrow, which reads a format.

    Raises:
        InputError: it is not installed.
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise InputError(
            f"{place}: is {what}, and this Python has no pyarrow to read it: pip install pyarrow"
        ) from None
    return pyarrow


def _find_delimiter(name: str, head: bytes, columns: Mapping[str, str]) -> str | None:
    """Return the delimiter of a table, the one that gives the most columns; None: no table."""
    lines = head.decode("utf-8", "replace").splitlines(keepends=True)
    if lines and lines[0].startswith("sep=") and len(lines[0].strip()) == 5:  # of Excel
        return lines[0][4]
    known = {*KEYS, *columns.values()}
    named = PurePath(name).suffix.lower() in _TABLES
    best, most = None, 1
    for delimiter in _DELIMITERS:
        try:
            header = next(csv.reader(lines, delimiter=delimiter), [])
        except csv.Error:
            continue
        if len(header) > most and (named or known & {column.strip() for column in header}):
            best, most = delimiter, len(header)
    return best or ("," if named and lines else None)
