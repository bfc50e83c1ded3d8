"""The rows of a table in text (CSV, TSV) as records, by the names of its header.

Quotation marks are those of RFC 4180. Tab-separated files are often written without any: where all
lines that a field in quotation marks would go over are rows by themselves, they are read as rows.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from trainer.data.annotation_status import find_rejections, is_status
from trainer.data.labels import LABEL, label_of_cell, whole_number
from trainer.data.records import (
    MAX_RECORD_BYTES,
    Problems,
    Record,
    TextLines,
    choose_columns,
)
from trainer.data.values import BadLineError, find_duplicate

_COLUMNS = 10_000
"""Columns of a table."""
_LABELS = 1000
"""Different labels that are remembered, to tell a row from a text of several lines."""
_ESCAPED = (
    "has a backslash before a quotation mark or a line end, as MySQL and BigQuery escape them;"
    ' write the table with doubled quotation marks (""), or as JSON Lines'
)
_OPEN = "a quotation mark opens a field and is not closed; close it, or double it in a quoted field"
_NULL = "\\N"


def read_table(
    stream: BinaryIO, source: str, delimiter: str, columns: Mapping[str, str], problems: Problems
) -> Iterator[Record]:
    """Yield the rows of a table below its header as objects of strings; an empty label is none."""
    # Of the whole process; no other code here reads tables.
    csv.field_size_limit(MAX_RECORD_BYTES)
    lines = _NotedLines(stream)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    table: _Table | None = None
    while True:
        number = lines.number + 1
        lines.taken.clear()
        row, error = None, None
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as problem:
            error = problem
        except BadLineError as problem:  # of a line's bytes
            problems.add_problem(f"{source}{number}", problem)
            if table is None:
                return
            continue
        if row is not None and (not row or (table is None and row == ["sep=", ""])):
            continue
        try:
            if table is None:
                if row is None:
                    raise BadLineError(f"not CSV: {error}")
                table = _Table(row, delimiter, columns, source)
                continue
            found = table.split(row, error, lines.taken)
        except BadLineError as problem:
            problems.add_problem(f"{source}{number}", problem)
            if table is None:
                return
            continue
        for index, each in enumerate(found):
            try:
                yield Record(table.read(each), source, number + index)
            except BadLineError as problem:
                problems.add_problem(f"{source}{number + index}", problem)


class _NotedLines(TextLines):
    """Lines that are kept until the row that they are is known."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.taken: list[str] = []

    def __next__(self) -> str:
        line = super().__next__()
        self.taken.append(line)
        return line


class _Table:
    """The columns of a table, and what its rows are by them.

    Raises:
        BadLineError: a name occurs twice.
        InputError: `columns` names a column that there is not.
    """

    def __init__(
        self, header: list[str], delimiter: str, columns: Mapping[str, str], source: str
    ) -> None:
        if len(header) > _COLUMNS:
            raise BadLineError(
                f"the header has {len(header):,} columns; at most {_COLUMNS:,} are read"
            )
        given = [name.strip() for name in header]
        if (double := find_duplicate(filter(None, given))) is not None:
            raise BadLineError(f"the header has the column {double[:40]!r} twice")
        names = [name or _name_column(index, given) for index, name in enumerate(given)]
        self._unnamed = {name for name, there in zip(names, given, strict=True) if not there}
        places = {name: index for index, name in enumerate(names)}
        chosen = choose_columns(names, columns, source)
        self._columns = [(places[theirs], ours) for ours, theirs in chosen.items()]
        self._statuses = [
            (places[name], name)
            for name in names
            if is_status(name) and name not in chosen.values()
        ]
        self._delimiter = delimiter
        self._width = len(header)
        self._label = next((place for place, ours in self._columns if ours == LABEL), None)
        self._labels: set[str] = set()

    def read(self, row: list[str]) -> dict[str, Any]:
        """Return the cells of a row by our names; columns without a name only if they are filled.

        Raises:
            BadLineError: a cell is none that can be read.
        """
        tree: dict[str, Any] = {}
        for index, name in self._columns:
            cell = row[index]
            if cell == _NULL:
                raise BadLineError(
                    f"'{name}' is {_NULL}, which MySQL writes for null; write the table with empty"
                    " fields, or as JSON Lines"
                )
            if name == LABEL:
                tree[name] = label_of_cell(cell)
            elif cell or name not in self._unnamed:
                tree[name] = cell
        tree |= find_rejections({name: row[index] for index, name in self._statuses})
        if self._label is not None and len(self._labels) < _LABELS:
            self._labels.add(row[self._label])
        return tree

    def split(
        self, row: list[str] | None, error: csv.Error | None, lines: list[str]
    ) -> list[list[str]]:
        """Return the rows of lines that were read as one row, or as none because of an error.

        Raises:
            BadLineError: they are no row.
        """
        fits = row is not None and len(row) == self._width
        if row is not None and fits and len(lines) == 1:
            return [row]
        is_quoted = fits and any('""' in line for line in lines)
        if self._delimiter == "\t" and self._are_rows(lines) and not is_quoted:
            return [self._split_line(line) for line in lines]
        escapes = any('\\"' in line or line.rstrip("\r\n").endswith("\\") for line in lines)
        if escapes and (not fits or self._is_escaped(lines[0])):
            raise BadLineError(_ESCAPED)
        if row is None or not fits:
            if error is not None:
                is_open = "end of data" in str(error) or "limit" in str(error)
                raise BadLineError(f"not CSV: {_OPEN if is_open else error}")
            raise BadLineError(f"has {len(row or ())} fields, the header has {self._width}")
        if self._are_rows(lines) and self._have_labels(lines):
            raise BadLineError(
                f"not CSV: {_OPEN} (it goes on over lines that are rows by themselves)"
            )
        return [row]

    def _are_rows(self, lines: list[str]) -> bool:
        return self._width > 1 and all(
            line.count(self._delimiter) == self._width - 1 for line in lines
        )

    def _split_line(self, line: str) -> list[str]:
        """Return the cells of a line; quotation marks that are not around a cell are text."""
        plain = line.rstrip("\r\n")
        try:
            (row,) = csv.reader([plain], delimiter=self._delimiter, strict=True)
        except csv.Error:
            return plain.split(self._delimiter)
        return row if len(row) == self._width else plain.split(self._delimiter)

    def _is_escaped(self, line: str) -> bool:
        """Whether a line is a row by itself with backslash escapes."""
        if '\\"' not in line:
            return False
        how: Any = {"escapechar": "\\", "doublequote": False, "strict": True}
        try:
            (row,) = csv.reader([line.rstrip("\r\n")], delimiter=self._delimiter, **how)
        except csv.Error:
            return False
        return len(row) == self._width

    def _have_labels(self, lines: list[str]) -> bool:
        """Whether each line has a label of other rows, or a number, in the label's place."""
        if self._label is None:
            return False
        labels = (line.strip("\r\n").split(self._delimiter)[self._label] for line in lines)
        return all(label in self._labels or whole_number(label) is not None for label in labels)


def _name_column(index: int, names: list[str]) -> str:
    """Return what a column without a name is called; the first is pandas' number of the row."""
    name = f"column {index + 1}" if index or "index" in names else "index"
    return name if name not in names else f"{name} without a name"
