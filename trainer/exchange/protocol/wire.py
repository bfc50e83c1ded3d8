"""Frames on the wire: a fixed header, a checked payload, nothing trusted before it is checked.

Sans-IO: bytes in, frames out, and back. The layout of a frame is in docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from trainer.system.errors import ProtocolError

MAGIC = b"MTLY"
PROTOCOL_VERSION = 12
MAX_CONTROL = 64 * 1024
"""Bytes of the largest control message, and of anything before a peer is admitted."""
MAX_PAYLOAD = 1024 * 1024
"""Bytes of the largest payload of one frame."""
MAX_WEIGHT = 2**32 - 1
"""Largest loss weight that a header can encode; larger sums saturate."""
CHUNK = MAX_PAYLOAD
"""Bytes of payload in the tensor frames we send: a sum needs whole blocks, so smaller is no use."""
SHARED = 0x1
"""The flag of a frame whose payload does not follow, but lies in memory that both ends map."""

_HEADER = struct.Struct("<4sBBBBIIIHHIIIQI")
_CHECKSUM = struct.Struct("<I")
HEADER_SIZE = _HEADER.size + _CHECKSUM.size


class IncompatibleError(ProtocolError):
    """The peer can never be understood: another protocol version, or another run."""


class MessageType(IntEnum):
    """Types of frames: JSON control messages, or raw tensor bytes."""

    JOIN_REQUEST = 1
    JOIN_ACCEPTED = 2
    JOIN_REFUSED = 3
    STATE = 4
    STATE_LOADED = 5
    SHARD_ASSIGNMENT = 6
    GRADIENT = 7
    AVERAGED_GRADIENT = 8
    SHARD_RESULT = 9
    STEP_COMMIT = 10
    WEIGHTS_REPORT = 11
    HEARTBEAT = 12
    LEAVE = 13
    SHUTDOWN = 14
    PARTIAL_SHARD = 15


_TYPES = {int(kind): kind for kind in MessageType}

TENSOR_TYPES = frozenset({MessageType.STATE, MessageType.GRADIENT, MessageType.AVERAGED_GRADIENT})


@dataclass(slots=True)
class Frame:
    """One message on the wire; never changed (`frozen` would take three times as long to make).

    The payload of a received frame is its own, and never changes; in shared memory that holds until
    the commit of its step.
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
    """Turns frames into bytes; numbers them so that a replay or a reorder is noticed.

    Without `checksums` the field is 0: TLS authenticates every byte already.
    """

    def __init__(self, run: int, *, checksums: bool = True) -> None:
        self._run = run
        self._checksums = checksums
        self._sequence = 0

    def encode(self, frame: Frame, *, shared: bool = False) -> tuple[bytes, bytes | memoryview]:
        """Return the header with its checksum, and the payload that follows it.

        The payload is not copied. One that the peer reads from `shared` memory does not follow.
        """
        limit = MAX_PAYLOAD if frame.type in TENSOR_TYPES else MAX_CONTROL
        length = len(frame.payload)
        assert length <= limit, f"{frame.type.name} of {length} bytes"
        header = _HEADER.pack(
            MAGIC,
            PROTOCOL_VERSION,
            frame.type,
            frame.codec,
            SHARED if shared else 0,
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
        payload = b"" if shared else frame.payload
        checksum = zlib.crc32(payload, zlib.crc32(header)) if self._checksums else 0
        return header + _CHECKSUM.pack(checksum), payload


class SharedPayloads(Protocol):
    """Memory that both ends of a connection map; see `transport/shared_memory.py`."""

    def payload(self, kind: MessageType, block: int, offset: int, length: int) -> memoryview:
        """Return part of an encoded block, valid until the step's commit.

        Raises:
            ProtocolError: they are not inside the block.
        """
        ...


class FrameDecoder:
    """Turns received bytes into frames; a payload lies in memory of its own, or in `shared`.

    Usage: receive into `free_space()`, which ends where the frame ends, and call `received(n)`.
    `admit()` raises the payload limit from `MAX_CONTROL` to `MAX_PAYLOAD` once the peer is known.
    """

    def __init__(
        self, run: int, *, checksums: bool = True, shared: SharedPayloads | None = None
    ) -> None:
        self._run = run
        self._checksums = checksums
        self._shared = shared
        self._sequence = 0
        self._limit = MAX_CONTROL
        self._header = bytearray(HEADER_SIZE)
        self._payload: memoryview | None = None
        """Where the payload of the present frame goes once its header is here."""
        self._space = memoryview(self._header)
        self._fields: tuple[Any, ...] = ()
        """Fields of the header that was checked last."""

    def accept_tensors(self) -> None:
        """Accept tensor payloads from now on."""
        self._limit = MAX_PAYLOAD

    def free_space(self) -> memoryview:
        """Return where the next bytes go; never empty, never beyond the present frame."""
        return self._space

    def advance(self, count: int) -> Frame | None:
        """Take `count` new bytes into account and return the frame if it is complete.

        Raises:
            ProtocolError: magic, version, run, type, length, checksum or sequence is wrong.
        """
        self._space = self._space[count:]
        if self._space:
            return None
        if self._payload is None and (follows := self._check_header()):
            self._payload = self._space = np.empty(follows, np.uint8).data
            return None
        return self._finish_frame()

    @property
    def is_mid_frame(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return self._payload is not None or len(self._space) < HEADER_SIZE

    def _check_header(self) -> int:
        """Return the length of the payload that follows; nothing was allocated for it yet."""
        self._fields = _HEADER.unpack_from(self._header)
        magic, version, kind, _, flags, *_, length = self._fields
        if magic != MAGIC:
            raise ProtocolError("the peer does not use Motley's protocol (bad magic)")
        if version != PROTOCOL_VERSION:
            raise IncompatibleError(
                f"the peer uses protocol version {version}, this side {PROTOCOL_VERSION}: "
                "install the same Motley on every host"
            )
        message_type = _TYPES.get(kind)
        if message_type is None:
            raise ProtocolError(f"unknown message type {kind}")
        if flags and (flags != SHARED or self._shared is None):
            raise ProtocolError(f"{message_type.name}: unknown flags {flags:#x}")
        limit = self._limit if message_type in TENSOR_TYPES else MAX_CONTROL
        if length > limit:
            raise ProtocolError(f"{message_type.name} of {length} bytes, at most {limit} allowed")
        return 0 if flags else length

    def _finish_frame(self) -> Frame:
        """Check what is whole now and return it as a frame."""
        payload, self._payload = self._payload or memoryview(b""), None
        self._space = memoryview(self._header)
        (
            _,
            _,
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
        ) = self._fields
        message_type = _TYPES[kind]
        if self._checksums:
            (checksum,) = _CHECKSUM.unpack_from(self._header, _HEADER.size)
            header = memoryview(self._header)[: _HEADER.size]
            if zlib.crc32(payload, zlib.crc32(header)) != checksum:
                raise ProtocolError(f"{message_type.name}: checksum does not match")
        if run != self._run:
            raise IncompatibleError(
                f"{message_type.name} of another run: check --run-id and the address"
            )
        if sequence != self._sequence:
            raise ProtocolError(
                f"{message_type.name}: received frame {sequence}, expected {self._sequence}"
            )
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        if flags:
            assert self._shared is not None
            payload = self._shared.payload(message_type, block, offset, length)
        return Frame(
            message_type, payload, generation, step, rank, block, shard, weight, offset, codec
        )
