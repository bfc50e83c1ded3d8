"""The pages of a Parquet column, counted before anything of it is decoded.

A few kilobytes of a file may unpack to gigabytes: runs, dictionaries and compression make long
columns of short ones. The footer's sizes are the file's own word; what pyarrow allocates follows
the header of each page (parquet.thrift of Apache Parquet; Thrift's compact protocol).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

DICTIONARY = 2
"""The kind of a page that holds a dictionary."""
DELTA_TEXT = 7
"""The encoding of texts that share their beginnings with the text before (DELTA_BYTE_ARRAY)."""
_DATA, _DATA_2 = 0, 3
_AS_THEY_ARE = frozenset((0, 3, 9))
"""Encodings in which values take the room that they have: PLAIN, BYTE_STREAM_SPLIT, and RLE, which
pyarrow reads of booleans alone."""
_DEEPEST = 4


class Page(NamedTuple):
    """The header of a page."""

    kind: int
    size: int
    """Bytes when unpacked, levels included."""
    values: int
    """Values, nulls included; of a nested column, its elements."""
    encoding: int


def read_pages(stream: BinaryIO, column: Any) -> Iterator[Page]:
    """Yield the pages of a column of a row group, as far as pyarrow would read them.

    Args:
        column: the ColumnChunkMetaData.

    Raises:
        ValueError: a header is damaged.
    """
    starts = [column.data_page_offset]
    if column.has_dictionary_page and column.dictionary_page_offset:
        starts.append(column.dictionary_page_offset)
    at = min(starts)
    end, seen = at + column.total_compressed_size, 0
    while seen < column.num_values and at < end:
        stream.seek(at)
        header = _read_struct(stream, 0)
        kind, size, packed = (header.get(field, -1) for field in (1, 2, 3))
        page = header.get({_DATA: 5, DICTIONARY: 7, _DATA_2: 8}.get(kind, 0), {})
        values = page.get(1, 0)
        encoding = page.get(4 if kind == _DATA_2 else 2, 0)
        if min(size, packed, values) < 0:
            raise ValueError("a page's header is damaged")
        at = stream.tell() + packed
        seen += values if kind in (_DATA, _DATA_2) else 0
        yield Page(kind, size, values, encoding)


def check_plain_pages(content: BinaryIO, metadata: Any, most: int) -> None:
    """Check that a file of our own takes no more memory than its values need.

    Raises:
        ValueError: its columns unpack to more than `most` bytes, or in a way that hides their size.
    """
    total = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            for page in read_pages(content, column):
                if page.kind == DICTIONARY or page.encoding not in _AS_THEY_ARE:
                    raise ValueError(f"column {column.path_in_schema} is not written plainly")
                # With its levels and its place in a list.
                total += page.size + 8 * page.values
                if total > most:
                    raise ValueError(f"unpacks to more than {most:,} bytes")


def _read_struct(stream: BinaryIO, depth: int) -> dict[int, Any]:
    """Return the fields of a Thrift struct by their numbers."""
    fields: dict[int, Any] = {}
    number = 0
    if depth > _DEEPEST:
        raise ValueError("a page's header is damaged")
    while head := _read_byte(stream):
        number = number + (head >> 4) if head >> 4 else _read_integer(stream)
        fields[number] = _read_value(stream, head & 15, depth)
    return fields


def _read_value(stream: BinaryIO, kind: int, depth: int) -> Any:
    if kind in (1, 2):
        return kind == 1
    if kind in (4, 5, 6):
        return _read_integer(stream)
    if kind == 8:  # a text, such as a column's least value
        stream.seek(_read_varint(stream), 1)
        return None
    if kind == 12:
        return _read_struct(stream, depth + 1)
    raise ValueError("a page's header is damaged")


def _read_integer(stream: BinaryIO) -> int:
    found = _read_varint(stream)
    return (found >> 1) ^ -(found & 1)


def _read_varint(stream: BinaryIO) -> int:
    found = 0
    for shift in range(0, 63, 7):
        byte = _read_byte(stream)
        found |= (byte & 127) << shift
        if byte < 128:
            return found
    raise ValueError("a page's header is damaged")


def _read_byte(stream: BinaryIO) -> int:
    found = stream.read(1)
    if not found:
        raise ValueError("a page's header is cut off")
    return found[0]
