"""Frames on the wire: a fixed header, a checked payload, nothing trusted before it is checked.

Sans-IO: bytes in, frames out, and back. The layout of a frame is in docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from trainer.errors import ProtocolError

MAGIC = b"MTLY"
PROTOCOL_VERSION = 2
MAX_CONTROL = 64 * 1024
"""Bytes of the largest control message, and of anything before a peer is admitted."""
MAX_PAYLOAD = 1024 * 1024
"""Bytes of the largest payload of one frame."""
MAX_WEIGHT = 2**32 - 1
"""The largest weight that a header can say; a larger sum is told as this."""
CHUNK = 64 * 1024
"""Bytes of payload in the gradient frames we send: the fastest size measured on 1 GbE."""

_FIRST_BUFFER = 4 * 1024
"""Bytes that a receive buffer begins with: a request to join fits, and a stranger costs no more."""
_HEADER = struct.Struct("<4sBBBBIIIHHIIIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size
_BUFFER = 2 * (MAX_CONTROL + HEADER_SIZE)
"""Bytes of a member's receive buffer until a frame needs more."""


class IncompatibleError(ProtocolError):
    """The peer can never be understood: another protocol version, or another run."""


class MessageType(IntEnum):
    """What a frame carries: JSON control messages, or raw tensor bytes."""

    JOIN_REQUEST = 1
    JOIN_ACCEPTED = 2
    JOIN_REFUSED = 3
    STATE = 4
    STATE_LOADED = 5
    SHARD_ASSIGNMENT = 6
    BLOCK_GRADIENT = 7
    AVERAGED_BLOCK_GRADIENT = 8
    NON_BLOCK_GRADIENT = 9
    AVERAGED_NON_BLOCK_GRADIENT = 10
    SHARD_RESULT = 11
    STEP_COMMIT = 12
    WEIGHTS_REPORT = 13
    HEARTBEAT = 14
    LEAVE = 15
    SHUTDOWN = 16


TENSOR_TYPES = frozenset(
    {
        MessageType.STATE,
        MessageType.BLOCK_GRADIENT,
        MessageType.AVERAGED_BLOCK_GRADIENT,
        MessageType.NON_BLOCK_GRADIENT,
        MessageType.AVERAGED_NON_BLOCK_GRADIENT,
    }
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message on the wire.

    `payload` of a received frame is a view that is valid only until the next frame is read.
    """

    type: MessageType
    payload: bytes | memoryview = b""
    generation: int = 0
    step: int = 0
    rank: int = 0
    block: int = 0
    shard: int = 0
    weight: int = 0
    """Samples or target tokens behind the whole contribution or average."""
    offset: int = 0
    """Byte offset of the payload in the encoded block."""
    codec: int = 0


def run_tag(run_id: str) -> int:
    """Return the 32-bit tag of a run id that every frame of the run carries."""
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=4).digest(), "little")


class FrameEncoder:
    """Turns frames into bytes; numbers them so that a replay or a reorder is noticed."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._sequence = 0

    def encode(self, frame: Frame) -> bytes:
        """Return the frame as one byte string: header, checksum, payload."""
        limit = MAX_PAYLOAD if frame.type in TENSOR_TYPES else MAX_CONTROL
        length = len(frame.payload)
        assert length <= limit, f"{frame.type.name} of {length} bytes"
        header = _HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            frame.type,
            frame.codec,
            0,
            self._run,
            frame.generation,
            frame.step,
            frame.rank,
            frame.block,
            frame.shard,
            self._sequence,
            frame.weight,
            frame.offset,
            length,
        )
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        checksum = zlib.crc32(frame.payload, zlib.crc32(header))
        return b"".join((header, _CHECKSUM.pack(checksum), frame.payload))


class FrameDecoder:
    """Turns received bytes into frames, in place, in a buffer that no peer can grow unchecked.

    Usage: receive into `free_space()`, call `received(n)`, iterate the frames. `admit()` raises
    the payload limit from `MAX_CONTROL` to `MAX_PAYLOAD` once the peer is known.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        self._sequence = 0
        self._limit = MAX_CONTROL
        self._buffer = bytearray(_FIRST_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._stop = 0

    def admit(self) -> None:
        """Accept tensor payloads from now on."""
        if self._limit != MAX_PAYLOAD:
            self._limit = MAX_PAYLOAD
            self._relocate(_BUFFER)

    def free_space(self) -> memoryview:
        """Return the part of the receive buffer that waits for bytes; never empty."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == len(self._buffer):
            self._relocate(len(self._buffer))
        return self._view[self._stop :]

    def received(self, count: int) -> Iterator[Frame]:
        """Take `count` new bytes into account and yield every frame that is complete.

        Raises:
            ProtocolError: magic, version, run, type, length, checksum or sequence is wrong.
        """
        self._stop += count
        while (frame := self._next()) is not None:
            yield frame

    @property
    def mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return self._start != self._stop

    def _next(self) -> Frame | None:
        if self._stop - self._start < HEADER_SIZE:
            return None
        (
            magic,
            version,
            kind,
            codec,
            flags,
            run,
            generation,
            step,
            rank,
            block,
            shard,
            sequence,
            weight,
            offset,
            length,
        ) = _HEADER.unpack_from(self._buffer, self._start)
        if magic != MAGIC:
            raise ProtocolError("the peer does not speak Motley's protocol (bad magic)")
        if version != PROTOCOL_VERSION:
            raise IncompatibleError(
                f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: "
                "install the same Motley on every host"
            )
        try:
            message_type = MessageType(kind)
        except ValueError:
            raise ProtocolError(f"unknown message type {kind}") from None
        if flags:
            raise ProtocolError(f"{message_type.name}: unknown flags {flags:#x}")
        limit = self._limit if message_type in TENSOR_TYPES else MAX_CONTROL
        if length > limit:
            raise ProtocolError(f"{message_type.name} of {length} bytes, at most {limit} allowed")
        end = self._start + HEADER_SIZE + length
        if end > self._stop:
            if HEADER_SIZE + length > len(self._buffer):
                larger = HEADER_SIZE + MAX_PAYLOAD if length > MAX_CONTROL else _BUFFER
                self._relocate(larger)
            return None
        payload = self._view[self._start + HEADER_SIZE : end]
        (checksum,) = _CHECKSUM.unpack_from(self._buffer, self._start + _HEADER.size)
        header = self._view[self._start : self._start + _HEADER.size]
        if zlib.crc32(payload, zlib.crc32(header)) != checksum:
            raise ProtocolError(f"{message_type.name}: checksum does not match")
        if run != self._run:
            raise IncompatibleError(
                f"{message_type.name} of another run: check --run-id and the address"
            )
        if sequence != self._sequence:
            raise ProtocolError(
                f"{message_type.name}: frame {sequence} came, {self._sequence} was due"
            )
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._start = end
        return Frame(
            message_type, payload, generation, step, rank, block, shard, weight, offset, codec
        )

    def _relocate(self, size: int) -> None:
        """Move what is unread to the front, of a larger buffer if `size` asks for one."""
        unread = bytes(self._view[self._start : self._stop])
        if size > len(self._buffer):
            self._buffer = bytearray(size)
            self._view = memoryview(self._buffer)
        self._buffer[: len(unread)] = unread
        self._start, self._stop = 0, len(unread)
