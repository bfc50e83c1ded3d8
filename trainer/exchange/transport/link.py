"""One connection in the event loop: frames in and out, lazily and in order."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress

from trainer.exchange.protocol.messages import SHARED_MEMORY
from trainer.exchange.protocol.wire import (
    Frame,
    FrameDecoder,
    IncompatibleError,
)
from trainer.exchange.transport.send_queue import RECORD, SendQueue
from trainer.exchange.transport.shared_memory import SharedBlocks
from trainer.exchange.transport.sockets import describe_peer
from trainer.exchange.transport.tls import Chain, retry_once
from trainer.system.errors import ProtocolError, plain_reason

FLUSH = 5.0
"""Seconds that a closing link may take to send what is queued."""
_TURN = 256 * 1024
"""Bytes that a link reads or writes before others get their turn, shared memory included: a worker
of this host has a whole gradient there at once, and the wire would wait for its sums."""
_LEAST = 64 * 1024
"""Bytes of a payload that wake the loop."""
_HOLD = 0.02
"""Seconds that averages may wait for the commit, short, so that the link does not look dead."""
_SCRAP = memoryview(bytearray(RECORD))
"""Where bytes go that no link needs any more."""
_WAIT = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""Errors of a socket that cannot continue yet."""

_Callback = Callable[["Link"], None]


class Link:
    """Frames over one socket.

    Frames queued with `send` may be iterators: they are drawn only as the socket takes bytes, so
    a slow reader costs references, not copies. `max_queued` bounds how far it may fall behind.
    `heard` is called when bytes came, and when the peer made room for more of ours.
    `incompatible` may send a last word to a peer that can never be understood.
    """

    def __init__(
        self,
        run: int,
        *,
        opened: _Callback,
        frame: Callable[[Link, Frame], None],
        on_bytes: _Callback,
        closed: Callable[[Link, str], None],
        max_queued: int,
        incompatible: Callable[[Link, str], None] | None = None,
    ) -> None:
        self._run = run
        self._opened, self._frame, self._closed = opened, frame, closed
        self._on_bytes = on_bytes
        self._max_queued = max_queued
        self._incompatible = incompatible
        self._holding: asyncio.TimerHandle | None = None
        self._blocked = False
        self._reading = False
        """Whether the loop will read again by itself, so that an event need not."""
        self._closing = False
        self._close_when_sent = self._notified = False
        self.admitted = False
        """Whether the peer is known."""
        self.error: Exception | None = None
        """Error that broke the connection, if one did."""
        self._reason = "the connection was closed"
        self._socket: socket.socket | None = None
        self.peer = "somewhere"
        """The peer's address."""

    def serve_connection(
        self, connection: socket.socket, shared: SharedBlocks | None = None
    ) -> None:
        """Serve a connected socket that does not block, with TLS complete if it has any."""
        self._socket = connection
        self._encrypted = isinstance(connection, ssl.SSLSocket)
        self._shared = shared
        self._least = 1
        self.peer = describe_peer(connection)
        self._queue = SendQueue(self._run, encrypted=self._encrypted, shared=shared)
        self._decoder = FrameDecoder(self._run, checksums=not self._encrypted, shared=shared)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection, self._on_readable)
        self._opened(self)

    # Called by the owner

    @property
    def certificates(self) -> Chain | None:
        """The peer's certificate and those of our CAs as `ssl` decodes them, None without TLS."""
        if not isinstance(self._socket, ssl.SSLSocket):
            return None
        return [self._socket.getpeercert() or {}, *self._socket.context.get_ca_certs()]

    @property
    def transport(self) -> str:
        """The transport that carries the frames."""
        if self._shared:
            return SHARED_MEMORY
        return "TLS" if self._encrypted else "TCP"

    @property
    def is_open(self) -> bool:
        """True once the connection was made, with TLS complete."""
        return self._socket is not None

    @property
    def is_idle(self) -> bool:
        """True if the socket took all that was queued."""
        return self._queue.is_empty

    def accept_tensors(self) -> None:
        """Accept tensor payloads from now on."""
        self.admitted = True
        self._decoder.accept_tensors()

    def send(self, frames: Iterable[Frame]) -> None:
        """Queue frames; the payloads must not change until they were sent."""
        if self._closing:
            return
        self._queue.append(frames)
        if len(self._queue) > self._max_queued:
            self.abort("it reads too slowly")
        elif not self._blocked:
            self._write_queued()

    def close(self, reason: str, *, notified: bool = False) -> None:
        """Send what is queued, then close.

        A peer that was `told` closes by itself, and what it still sends is dropped: to close with
        bytes unread would reset the connection, and a peer whose write fails reads no more.
        """
        if self._closing or self._socket is None:
            return
        self._reason = reason
        self._notified = notified
        self._close_when_sent = True
        self._loop.call_later(FLUSH, self._end_link, None)
        if not self._blocked:
            self._write_queued()

    def poll(self) -> None:
        """Read the bytes that have arrived, however few: call this from time to time.

        On a slow line one wake-up's worth of bytes can take longer than silence may last.
        """
        if self._socket is not None:
            self._on_readable()

    def abort(self, reason: str) -> None:
        """Close at once."""
        if self._socket is not None and not self._closing:
            self._reason = reason
            self._closing = True
            self._stop_writing()
            self._loop.call_soon(self._end_link, None)

    # Called by the event loop

    def _on_readable(self) -> None:
        if not self._reading:
            self._read_batch()

    def _continue_reading(self) -> None:
        self._reading = False
        self._read_batch()

    def _read_batch(self) -> None:
        taken = 0
        while taken < _TURN and self._socket is not None:
            try:
                space = _SCRAP if self._closing else self._decoder.free_space()
                if self._encrypted:
                    count = retry_once(self._socket.recv_into, space)
                else:
                    count = self._socket.recv_into(space)
            except _WAIT:
                self._wake_for(len(self._decoder.free_space()))
                return
            except OSError as error:
                self._end_link(error)
                return
            if not count:
                if not self._closing and self._decoder.is_mid_frame:
                    self._reason = "the connection broke inside a frame"
                self._end_link(None)
                return
            if not self._closing:
                if not taken:
                    self._on_bytes(self)
                count += self._handle_bytes(count)
            taken += count
        if self._shared is None and self._socket is not None:
            # TLS may hold bytes that the kernel no longer reports: no event follows for them.
            self._reading = True
            self._loop.call_soon(self._continue_reading)

    def _wake_for(self, wanted: int) -> None:
        """Have the kernel wake the loop for many bytes at once, not for every packet.

        `wanted` bytes complete the frame; OpenSSL may hold the beginning of a record already.
        """
        if self._socket is None or self._socket.family == socket.AF_UNIX:
            return
        least = max(min(wanted - RECORD, _LEAST), 1)
        if least != self._least:
            self._least = least
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _handle_bytes(self, count: int) -> int:
        """Take received bytes in and return how many more came with them in shared memory."""
        try:
            if frame := self._decoder.advance(count):
                self._frame(self, frame)
                if self._shared:
                    self._shared.mark_consumed(frame)
                    return len(frame.payload)
        except IncompatibleError as error:
            self.error = error
            if self._incompatible:
                self._incompatible(self, str(error))
            self.close(str(error), notified=self._incompatible is not None)
        except ProtocolError as error:
            self.abort(str(error))
        return 0

    def _write_queued(self) -> None:
        """Send until the socket is full or nothing is queued."""
        self._blocked = False
        sent = 0
        while sent < _TURN:
            if self._closing or self._socket is None:
                return
            if not self._queue.has_bytes():
                if self._close_when_sent:
                    self._shut_down_writing()
                return
            if self._queue.can_wait():
                if self._holding is None:
                    self._holding = self._loop.call_later(_HOLD, self._stop_holding)
                return
            try:
                sent += self._queue.send_to(self._socket)
            except _WAIT:
                self._blocked = True
                self._loop.add_writer(self._socket, self._on_writable)
                return
            except OSError as error:
                self._stop_writing()
                self._loop.call_soon(self._read_rest, error)
                return
        self._blocked = True
        self._loop.call_soon(self._write_queued)

    def _on_writable(self) -> None:
        assert self._socket is not None
        self._loop.remove_writer(self._socket)
        self._on_bytes(self)
        self._write_queued()

    # Inside

    def _stop_holding(self) -> None:
        self._holding = None
        self._queue.stop_waiting()
        if not self._blocked:
            self._write_queued()

    def _shut_down_writing(self) -> None:
        """Send the end of the stream; then the peer's end comes, or `close` waits no longer."""
        assert self._socket is not None
        self._closing = True
        if not self._notified:
            with suppress(OSError, ValueError):
                if isinstance(self._socket, ssl.SSLSocket):
                    self._socket.unwrap()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _read_rest(self, error: OSError) -> None:
        """Read the peer's last messages once writing to it has failed, and end."""
        self._read_batch()
        self._end_link(error)

    def _stop_writing(self) -> None:
        self._queue.clear()
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _end_link(self, error: OSError | None) -> None:
        """Notify the owner, then close the socket, once."""
        if self._socket is None:
            return
        self._stop_writing()
        self._loop.remove_reader(self._socket)
        if error is not None and not self._closing:
            self.error = error
            self._reason = f"the connection broke: {plain_reason(error)}"
        self._closing = True
        connection, self._socket = self._socket, None
        try:
            self._closed(self, self._reason)
        finally:
            connection.close()
            if self._shared:
                self._shared.close()
