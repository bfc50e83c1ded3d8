"""One connection as an asyncio protocol: frames in and out, lazily and in order."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import cast

from trainer.errors import ProtocolError
from trainer.exchange.protocol.wire import Frame, FrameDecoder, FrameEncoder, IncompatibleError

HANDSHAKE = 5.0
"""Seconds that a TLS handshake may take."""
FLUSH = 5.0
"""Seconds that a closing link may take to send what is queued."""
_HIGH_WATER = 256 * 1024
_TURN = 32
"""Frames that a link writes before others get their turn, also to a reader as quick as we are."""
_SEND_BUFFER = 256 * 1024
"""Bytes in flight and unsent of one connection: enough for 1 Gbit/s over 2 ms."""
_CONGESTION = (b"cubic", b"reno")
"""In this order. BBR, which some hosts default to, paces our bursts by a bandwidth that it measured
while others shared the link, and lets workers drift apart: 1.30 of the wire's limit, not 1.1."""


class Link(asyncio.BufferedProtocol):
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
        opened: Callable[[Link], None],
        frame: Callable[[Link, Frame], None],
        heard: Callable[[Link], None],
        closed: Callable[[Link, str], None],
        max_queued: int,
        incompatible: Callable[[Link, str], None] | None = None,
    ) -> None:
        self._decoder = FrameDecoder(run)
        self._encoder = FrameEncoder(run)
        self._opened, self._frame, self._closed = opened, frame, closed
        self._heard = heard
        self._max_queued = max_queued
        self._incompatible = incompatible
        self._queue: deque[Iterator[Frame]] = deque()
        self._paused = False
        self._resting = False
        self._closing = False
        self._close_when_sent = self._told = False
        self.error: Exception | None = None
        """What broke the connection, if anything did."""
        self._reason = "the connection was closed"
        self._transport: asyncio.Transport | None = None

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        _share_the_wire(self._transport.get_extra_info("socket"))
        self._opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        del sizehint
        return self._decoder.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on what came."""
        if self._closing:
            return
        self._heard(self)
        try:
            for frame in self._decoder.received(nbytes):
                if self._closing:
                    return
                self._frame(self, frame)
        except IncompatibleError as error:
            self.error = error
            if self._incompatible:
                self._incompatible(self, str(error))
            self.close(str(error), told=self._incompatible is not None)
        except ProtocolError as error:
            self.abort(str(error))

    def eof_received(self) -> None:
        """Note that the peer sends no more; asyncio closes the transport."""
        if self._decoder.mid_frame:
            self._reason = "the connection broke inside a frame"

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._queue.clear()
        if exc is not None and not self._closing:
            self.error = exc
            self._reason = f"the connection broke: {exc}"
        self._closing = True
        self._closed(self, self._reason)

    def pause_writing(self) -> None:
        """Wait: the socket is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """Go on."""
        self._paused = False
        self._heard(self)
        self._pump()

    # What the owner calls

    @property
    def certificates(self) -> list[dict[str, object]] | None:
        """The peer's certificate and those of our CAs as `ssl` decodes them, None without TLS."""
        assert self._transport is not None
        encrypted = self._transport.get_extra_info("ssl_object")
        if not encrypted:
            return None
        return [encrypted.getpeercert(), *encrypted.context.get_ca_certs()]

    @property
    def peer(self) -> str:
        """The peer's address."""
        assert self._transport is not None
        host, port, *_ = self._transport.get_extra_info("peername")
        return f"{host}:{port}"

    @property
    def opened(self) -> bool:
        """Whether the connection was made, with TLS complete."""
        return self._transport is not None

    @property
    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not self._queue

    def admit(self) -> None:
        """Accept tensor payloads from now on."""
        self._decoder.admit()

    def send(self, frames: Iterable[Frame]) -> None:
        """Queue frames; the payloads must not change until they were sent."""
        if self._closing:
            return
        self._queue.append(iter(frames))
        if len(self._queue) > self._max_queued:
            self.abort("it reads too slowly")
            return
        self._pump()

    def close(self, reason: str, *, told: bool = False) -> None:
        """Send what is queued, then close.

        A peer that was `told` closes by itself, and what it still sends is dropped: to close with
        bytes unread would reset the connection, and a peer whose write fails reads no more.
        """
        if self._closing or self._transport is None:
            return
        self._reason = reason
        self._told = told
        self._close_when_sent = True
        self._pump()
        asyncio.get_running_loop().call_later(FLUSH, self._transport.abort)

    def abort(self, reason: str) -> None:
        """Close at once."""
        if self._transport is not None and not self._closing:
            self._reason = reason
            self._closing = True
            self._queue.clear()
            self._transport.abort()

    def _go_on(self) -> None:
        self._resting = False
        self._pump()

    def _pump(self) -> None:
        assert self._transport is not None
        written = 0
        while self._queue and not self._paused and not self._resting:
            if written == _TURN:
                self._resting = True
                asyncio.get_running_loop().call_soon(self._go_on)
                return
            frame = next(self._queue[0], None)
            if frame is None:
                self._queue.popleft()
            else:
                self._transport.write(self._encoder.encode(frame))
                written += 1
        if self._close_when_sent and not self._queue:
            self._closing = True
            if not self._told:
                self._transport.close()


def _share_the_wire(connection: socket.socket | None) -> None:
    """Keep members abreast that share a link: an average waits for the last of them.

    A short send buffer keeps the queues on the way short; in long ones the acknowledgements of the
    other direction wait, and uploads drift apart. And no congestion control such as BBR, which
    shares a link badly; Linux only, and who is not root may choose what
    `tcp_allowed_congestion_control` lists. Measured: benchmarks/exchange.py, docs/decisions.md.
    """
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    option: int | None = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return
    for name in _CONGESTION:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, name)
            return
