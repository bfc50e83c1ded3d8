"""The messages of an Arrow file or stream: what each unpacks to, before any is decoded.

A packed buffer begins with its size, for which pyarrow allocates the memory (Message.fbs and
File.fbs of Apache Arrow; FlatBuffers).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO

_CONTINUES = 0xFFFFFFFF
_LONGEST = 64 << 20
"""Bytes of a message's metadata, or of a file's."""
_DICTIONARY, _BATCH = 2, 3


def unpacked_sizes(stream: BinaryIO, is_file: bool) -> Iterator[int]:
    """Yield the bytes that each message's buffers unpack to; 0 where they are not packed.

    Dictionaries stay, so of one it is those of all before it as well.

    Raises:
        ValueError: a message is damaged.
    """
    kept = 0
    try:
        for at in _iter_blocks(stream) if is_file else _one_after_another(stream):
            kind, size = _read_unpacked_size(stream, at)
            kept += size if kind == _DICTIONARY else 0
            yield kept if kind == _DICTIONARY else size
    except (struct.error, IndexError, OverflowError):
        raise ValueError("a message is cut off") from None


def _one_after_another(stream: BinaryIO) -> Iterator[int]:
    at = 0
    while found := _read_message(stream, at):
        yield at
        tree, body = found
        at = body + tree.read_long(3)


def _iter_blocks(stream: BinaryIO) -> Iterator[int]:
    """Yield the places of a file's messages, which its end lists."""
    stream.seek(-10, 2)
    end = stream.tell()
    (size,) = struct.unpack("<i", stream.read(4))
    if not 0 < size <= min(_LONGEST, end):
        raise ValueError("its end is damaged")
    stream.seek(end - size)
    footer = _Table.parse_root(stream.read(size))
    for field in (2, 3):  # dictionaries, batches
        for place in footer.iter_vector(field, 24):
            yield struct.unpack_from("<q", footer.data, place)[0]


def _read_message(stream: BinaryIO, at: int) -> tuple[_Table, int] | None:
    """Return a message and where its body begins; None at the end."""
    stream.seek(at)
    (size,) = struct.unpack("<I", stream.read(4))
    if size == _CONTINUES:
        (size,) = struct.unpack("<I", stream.read(4))
    if size > _LONGEST:
        raise ValueError("a message is damaged")
    return (_Table.parse_root(stream.read(size)), stream.tell()) if size else None


def _read_unpacked_size(stream: BinaryIO, at: int) -> tuple[int, int]:
    """Return the kind of a message, and what its buffers unpack to."""
    found = _read_message(stream, at)
    if found is None:
        return 0, 0
    message, body = found
    kind, batch = message.read_byte(1), message.read_table(2)
    if kind == _DICTIONARY and batch is not None:
        batch = batch.read_table(1)
    if kind not in (_DICTIONARY, _BATCH) or batch is None or batch.read_table(3) is None:
        return kind, 0
    total = 0
    for place in batch.iter_vector(2, 16):
        offset, length = struct.unpack_from("<qq", batch.data, place)
        if length >= 8:
            stream.seek(body + offset)
            total += max(0, *struct.unpack("<q", stream.read(8)))  # -1: as it is
    return kind, total


class _Table:
    """A table of FlatBuffers."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self._at = data, at

    @classmethod
    def parse_root(cls, data: bytes) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def _find_field(self, number: int) -> int | None:
        known = self._at - struct.unpack_from("<i", self.data, self._at)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", self.data, known)[0]:
            return None
        offset = struct.unpack_from("<H", self.data, known + 4 + 2 * number)[0]
        return self._at + offset if offset else None

    def read_byte(self, number: int) -> int:
        at = self._find_field(number)
        return 0 if at is None else self.data[at]

    def read_long(self, number: int) -> int:
        at = self._find_field(number)
        found = 0 if at is None else struct.unpack_from("<q", self.data, at)[0]
        if found < 0:
            raise ValueError("a message is damaged")
        return found

    def _follow_offset(self, number: int) -> int | None:
        at = self._find_field(number)
        return None if at is None else at + struct.unpack_from("<I", self.data, at)[0]

    def read_table(self, number: int) -> _Table | None:
        at = self._follow_offset(number)
        return None if at is None else _Table(self.data, at)

    def iter_vector(self, number: int, width: int) -> Iterator[int]:
        """Yield the places of a vector's structs."""
        if (at := self._follow_offset(number)) is not None:
            count = struct.unpack_from("<I", self.data, at)[0]
            if count * width > len(self.data):
                raise ValueError("a message is damaged")
            yield from range(at + 4, at + 4 + count * width, width)
