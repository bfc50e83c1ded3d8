"""The queue of a link: streams of frames, drawn and encoded as the socket takes bytes."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator

from trainer.exchange.protocol.wire import Frame, FrameEncoder
from trainer.exchange.transport.shared_memory import SharedBlocks
from trainer.exchange.transport.tls import retry_once

RECORD = 16 * 1024
"""Bytes of the largest TLS record."""
_HELD = 12
"""Buffers that may wait for more."""


class SendQueue:
    """Streams of frames in order; at most what is being sent is encoded."""

    def __init__(self, run: int, *, encrypted: bool, shared: SharedBlocks | None) -> None:
        self._encoder = FrameEncoder(run, checksums=not encrypted)
        self._encrypted = encrypted
        self._shared = shared
        self._streams: deque[Iterator[Frame]] = deque()
        self._buffers: list[memoryview] = []
        self._patient = False
        """Whether all buffers may wait for more."""

    def __len__(self) -> int:
        """Return how many streams were not drawn whole."""
        return len(self._streams)

    @property
    def is_empty(self) -> bool:
        """True if the socket took all that was queued."""
        return not self._streams and not self._buffers

    def append(self, frames: Iterable[Frame]) -> None:
        """Queue a stream."""
        self._streams.append(iter(frames))

    def clear(self) -> None:
        """Forget everything."""
        self._streams.clear()
        self._buffers.clear()

    def has_bytes(self) -> bool:
        """Return whether there are bytes to send."""
        return bool(self._buffers) or self._encode_next()

    def can_wait(self) -> bool:
        """Return whether what is ready is of use only with what comes later.

        A worker applies averages at the commit: sent one by one, each woke it for nothing.
        """
        while self._patient and len(self._buffers) < _HELD:
            if not self._encode_next():
                return True
        self._patient = False
        return False

    def stop_waiting(self) -> None:
        """Send what is ready next time."""
        self._patient = False

    def send_to(self, connection: socket.socket) -> int:
        """Send what a socket takes and return how many bytes that were.

        Raises:
            OSError: it takes none now, or is broken.
        """
        if isinstance(connection, ssl.SSLSocket):
            count = retry_once(connection.send, self._buffers[0])
        else:
            count = connection.sendmsg(self._buffers)
        left = count
        while self._buffers and left >= len(self._buffers[0]):
            left -= len(self._buffers.pop(0))
        if left:
            self._buffers[0] = self._buffers[0][left:]
        return count

    def _encode_next(self) -> bool:
        """Encode the next frame; return whether there was one."""
        while self._streams:
            frame = next(self._streams[0], None)
            if frame is None:
                self._streams.popleft()
                continue
            shared = self._shared is not None and self._shared.place_payload(frame)
            header, payload = self._encoder.encode(frame, shared=shared)
            if self._encrypted and payload:
                # One record less: the header travels with the beginning of its payload.
                cut = RECORD - len(header)
                header, payload = b"".join((header, payload[:cut])), payload[cut:]
            self._buffers.append(memoryview(header))
            if payload:
                self._buffers.append(memoryview(payload))
            self._patient = shared and self._shared is not None and self._shared.patient
            return True
        return False
