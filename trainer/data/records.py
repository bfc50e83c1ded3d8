"""Records of a text file, each with its place: JSON Lines, a JSON array, paragraphs.

The readers take a stream in UTF-8 without a byte order mark. They hold one record at a time, and
report a record that cannot be read instead of yielding it.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainer.data.annotation_status import find_rejections
from trainer.data.values import BadLineError, unique_keys
from trainer.system.errors import InputError

MAX_RECORD_BYTES = 10 * 1024 * 1024
"""A longer record is reported, not parsed."""
REPORTED = 10
"""Different problems that an error lists; further ones are counted."""
PIECE = 1 << 16


class DataError(InputError):
    """A data file has bad records: the message names the first as `file:line: problem`, and
    `details` the first of each other problem."""


class Record(NamedTuple):
    """One record of a data file."""

    tree: Any
    """Its JSON value; of a table, an object of its columns."""
    source: str
    """Prefix of its number in a message: `file:`, or `file: row `."""
    number: int
    """Its line, or its row where a file has no lines; counted from 1."""
    begin: int = 0
    """The byte at which its line begins, of JSON Lines."""
    size: int = 0
    """The bytes of that line."""

    @property
    def location(self) -> str:
        """`file:line`, or `file: row N`."""
        return f"{self.source}{self.number}"

    def locate_in(self, data: Path) -> str:
        """Return its place in data of this path: `line N`, or of a folder's file `name:N`."""
        inner = self.source.removeprefix(str(data))
        return f"line {self.number}" if inner == ":" else f"{inner.lstrip('/: ')}{self.number}"


class Problems:
    """The bad records of a file: all are counted, the first of each problem is named."""

    def __init__(self) -> None:
        self._places: dict[str, list[str]] = {}  # the first two of each problem
        self._counts: Counter[str] = Counter()
        self._unnamed = 0

    def add_problem(self, place: str, problem: object) -> None:
        """Count a bad record."""
        text = str(problem)
        if text not in self._places and len(self._places) == REPORTED:
            self._unnamed += 1
            return
        self._counts[text] += 1
        places = self._places.setdefault(text, [])
        if len(places) < 2:
            places.append(place)

    def raise_if_any(self) -> None:
        """Check that no record was bad.

        Raises:
            DataError: some were.
        """
        if self._places:
            first, *others = map(self._describe_problem, self._places)
            if self._unnamed:
                others.append(f"and {self._unnamed:,} more bad lines")
            raise DataError(first, others)

    def _describe_problem(self, problem: str) -> str:
        first, *second = self._places[problem]
        same = self._counts[problem] - 1
        if not second:
            return f"{first}: {problem}"
        more = f" and {same - 1:,} more" if same > 1 else ""
        return f"{first}: {problem}; the same at {second[0]}{more}"


def read_json_lines(
    stream: BinaryIO, source: str, begin: int, problems: Problems
) -> Iterator[Record]:
    """Yield the JSON values of lines that are not blank; `begin` is the first line's byte."""
    number = 0
    while piece := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        size = len(piece)
        try:
            if size > MAX_RECORD_BYTES and piece[-1] != 10:
                size += _skip_line(stream)
                raise BadLineError(f"line is longer than {MAX_RECORD_BYTES >> 20} MiB")
            if not piece.isspace():
                yield Record(parse_line(piece), source, number, begin, size)
        except BadLineError as error:
            problems.add_problem(f"{source}{number}", error)
        begin += size


def _skip_line(stream: BinaryIO) -> int:
    size = 0
    while piece := stream.readline(MAX_RECORD_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


def parse_line(raw: bytes) -> Any:
    """Return the JSON value of a line.

    Raises:
        BadLineError: it is not JSON, or an object has a key twice.
    """
    try:
        # Without the newline, after which a column would belong to the next line.
        return _DECODER.decode(raw.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadLineError(f"not valid UTF-8 at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise BadLineError(f"{_describe_error(error)} at column {error.colno}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or deep nesting
        raise BadLineError(_TOO_MUCH) from None


_DECODER = json.JSONDecoder(object_pairs_hook=unique_keys)


_TOO_MUCH = "not JSON that can be read: a number too long or nested too deep"


def _describe_error(error: json.JSONDecodeError) -> str:
    return f"not JSON: {error.msg.removesuffix(' at')}"


def read_json_array(stream: BinaryIO, source: str, problems: Problems) -> Iterator[Record]:
    """Yield the elements of the JSON array that a stream holds.

    Only its syntax shows where an element ends, so the first error ends the reading.
    """
    text, number = _ArrayText(stream), 1
    try:
        text.skip_character("[")
        while text.peek_character() != "]":
            value = text.parse_value()
            yield Record(value, source, number)
            number += 1
            if text.peek_character() != "]":
                text.skip_character(",")
        text.skip_character("]")
        if text.peek_character():
            raise BadLineError("not JSON: the array ends, and more follows")
    except BadLineError as error:
        problems.add_problem(f"{source}{number}", f"{error} (line {text.line})")


class _ArrayText:
    """The text of an array, read as far as the next value needs it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._passed = "", 0, 1

    @property
    def line(self) -> int:
        """The line of the next character."""
        return self._passed + self._text.count("\n", 0, self._at)

    def peek_character(self) -> str:
        """Return the next character that is no white space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if not (found := self._text[self._at]).isspace():
                    return found
                self._at += 1
            if not self._read_more():
                return ""

    def skip_character(self, expected: str) -> None:
        """Pass a character.

        Raises:
            BadLineError: the next one is another.
        """
        if (found := self.peek_character()) != expected:
            given = repr(found) if found else "the end of the file"
            raise BadLineError(f"not JSON: expected '{expected}', got {given}")
        self._at += 1

    def parse_value(self) -> Any:
        """Return the next value, and pass it.

        Raises:
            BadLineError: it is not JSON.
        """
        while True:
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._read_more():  # else a number may go on
                    self._at = end if end < len(self._text) else len(self._text)
                    return found
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > MAX_RECORD_BYTES:
                    limit = MAX_RECORD_BYTES >> 20
                    raise BadLineError(f"is longer than {limit} MiB, or not JSON") from None
                if not self._read_more():
                    raise BadLineError(_describe_error(error)) from None
            except (ValueError, RecursionError):
                raise BadLineError(_TOO_MUCH) from None

    def _read_more(self) -> bool:
        """Read on, twice as much for each repetition of a value; return whether there was more."""
        raw = self._stream.read(max(PIECE, len(self._text) - self._at))
        self._passed = self.line
        try:
            rest = self._decoder.decode(raw, final=not raw)
        except UnicodeDecodeError:
            raise BadLineError("not valid UTF-8") from None
        self._text, self._at = self._text[self._at :] + rest, 0
        return bool(raw)


def rename_keys(
    found: Iterator[Record], columns: Mapping[str, str], problems: Problems
) -> Iterator[Record]:
    """Yield records whose objects have only the chosen keys, under our names.

    And what says that an annotator rejected one.

    Raises:
        InputError: the first object lacks one.
    """
    first = True
    for record in found:
        if not columns or not isinstance(record.tree, dict):
            yield record
            continue
        if first:
            choose_columns([*record.tree], columns, record.source)
            first = False
        if lacking := [theirs for theirs in columns.values() if theirs not in record.tree]:
            problems.add_problem(record.location, f"lacks the key {lacking[0]!r}")
        else:
            tree = {ours: record.tree[theirs] for ours, theirs in columns.items()}
            others = {key: record.tree[key] for key in record.tree.keys() - {*columns.values()}}
            yield record._replace(tree=tree | find_rejections(others))


class TextLines:
    """The lines of a stream as text, counted."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.number = 0

    def __iter__(self) -> TextLines:
        return self

    def __next__(self) -> str:
        raw = self._stream.readline(MAX_RECORD_BYTES + 1)
        if not raw:
            raise StopIteration
        self.number += 1
        if b"\0" in raw:
            raise BadLineError("contains a NUL byte, so it is not text")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadLineError(
                f"not valid UTF-8 at byte {error.start + 1}; save it as UTF-8"
            ) from None


def choose_columns(
    names: Sequence[str], columns: Mapping[str, str], source: str
) -> Mapping[str, str]:
    """Return the columns to read, our name to the file's; all of them if none are chosen.

    Raises:
        InputError: a chosen one does not exist.
    """
    if not columns:
        return {name: name for name in names}
    for ours, theirs in columns.items():
        if theirs not in names:
            there = ", ".join(repr(name[:40]) for name in names[:20]) or "none"
            setting = "" if ours == theirs else f" (data.columns.{ours})"
            raise InputError(f"{source} no key {theirs!r}{setting}; it has {there}")
    return columns


def read_paragraphs(stream: BinaryIO, source: str, problems: Problems) -> Iterator[Record]:
    """Yield the paragraphs of a text, which blank lines divide, as `{text}`.

    Without a blank line in its first 10 MiB each line of it is one.
    """
    lines = TextLines(stream)
    held: list[str] = []
    begin = size = 0
    by_line: bool | None = None  # known at the first blank line, or when there is none
    while True:
        try:
            line = next(lines, "")
        except BadLineError as error:
            problems.add_problem(f"{source}{lines.number}", error)
            continue
        blank = not line.strip()
        if by_line is None and held:
            ended = not line or size > MAX_RECORD_BYTES
            by_line = True if ended else False if blank else None
        if held and (by_line or blank or size > MAX_RECORD_BYTES):
            parts = held if by_line else ["".join(held)]
            for index, part in enumerate(parts):
                yield Record({"text": part.rstrip("\r\n")}, source, begin + index)
            held = []
        if not line:
            return
        if not blank:
            if not held:
                begin, size = lines.number, 0
            held.append(line)
            size += len(line)
