"""Accepts connections, and bounds the cost of those that are not authenticated yet.

Until a peer is a member, with or without a certificate, its connection counts against a limit in
all, one for its address, and the descriptors that are left. Over a limit a connection is closed
before TLS begins, and its worker tries again; a place is free again after the handshake's and the
introduction's timeouts.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.exchange.transport import tls
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.refusals import RefusalReporter
from trainer.exchange.transport.sockets import HANDSHAKE, shake_hands
from trainer.system.errors import InputError

MAX_PENDING = 64
"""Connections that are not members yet, in all."""
MAX_PENDING_PER_ADDRESS = 32
"""Limit of one address: twice the workers that a machine may start at once."""
RESERVED = 64
"""Descriptors kept back for checkpoints and logs."""
_LEAST = 8
"""Connections that are allowed however few descriptors there are."""
_BATCH = 16
"""Connections accepted before others get their turn."""
_BACKLOG = 512
_REST = 1.0
"""Seconds without accepting after the system failed to."""


@dataclass(eq=False)
class _PendingPeer:
    host: str
    beginning: asyncio.Task[None]


@dataclass(frozen=True)
class BoundAddress:
    """An address that this process has; until a Listener starts there, connections are refused."""

    host: str
    sockets: list[socket.socket]
    context: ssl.SSLContext | None

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        return self.sockets[0].getsockname()[1]

    def bind_again(self) -> BoundAddress:
        """Return the address with sockets of their own, for a Listener that ends before another's.

        Linux lets sockets with SO_REUSEADDR share an address while at most one of them listens.

        Raises:
            InputError: another process listens there.
        """
        places = {(each.family, each.getsockname()[:2]) for each in self.sockets}
        with _naming_address(self.host, self.port):
            return BoundAddress(self.host, _bind_sockets(places), self.context)

    def close(self) -> None:
        """Close the sockets."""
        for each in self.sockets:
            each.close()


def bind_address(bind: tuple[str, int], folder: Path | None) -> BoundAddress:
    """Bind an address, with the certificate in a folder; None for plaintext on loopback.

    Raises:
        InputError: it cannot be bound, or is reached by other machines in plaintext.
    """
    host, port = bind
    if folder is None and not tls.is_loopback(host):
        raise InputError(
            f"--bind {host}: other machines can reach this address, so TLS is needed; give "
            "--tls DIR, or let `launch cluster up` start the run"
        )
    context = tls.make_context(folder, server=True) if folder else None
    with _naming_address(host, port):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        places = {(family, place[:2]) for family, _, _, _, place in found}
        return BoundAddress(host, _bind_sockets(places), context)


class Listener:
    """Accepts connections at an address, whose sockets it closes at its end."""

    def __init__(
        self, bound: BoundAddress, make_link: Callable[[], Link], refusals: RefusalReporter
    ) -> None:
        self._bound = bound
        self._make_link = make_link
        self._refusals = refusals
        self._pending: dict[Link, _PendingPeer] = {}
        self._members: set[Link] = set()
        self._room = max(_LEAST, _count_free_descriptors() - RESERVED)

    def start(self) -> None:
        """Accept from now on.

        Raises:
            InputError: another process listens at the address.
        """
        loop = asyncio.get_running_loop()
        for listening in self._bound.sockets:
            with _naming_address(self._bound.host, self._bound.port):
                listening.listen(_BACKLOG)
            loop.add_reader(listening, self._accept_connections, listening)

    def close(self) -> None:
        """Accept no more, and end what never became a member."""
        for listening in self._bound.sockets:
            if listening.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        for link, peer in list(self._pending.items()):
            if link.is_open:
                link.abort("the run is over")
            else:
                peer.beginning.cancel()
        self._pending.clear()

    def admit_link(self, link: Link) -> None:
        """Count a link as a member's from now on."""
        if self._pending.pop(link, None):
            self._members.add(link)

    def forget_link(self, link: Link) -> None:
        """Forget a link."""
        self._pending.pop(link, None)
        self._members.discard(link)

    def _accept_connections(self, listening: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                connection, (host, *_) = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or memory; without a rest this would spin
                reason = f"not accepted ({os.strerror(error.errno or 0)})"
                self._report_refusal("this machine", reason)
                self._pause_accepting(listening)
                return
            if self._has_room(host):
                self._begin_handshake(connection, host)
            else:
                connection.close()
                self._report_refusal(host, "closed at once: too many connections have not joined")

    def _pause_accepting(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(listening)

        def go_on() -> None:
            if listening.fileno() >= 0:
                loop.add_reader(listening, self._accept_connections, listening)

        loop.call_later(_REST, go_on)

    def _has_room(self, host: str) -> bool:
        """Return whether one more connection of an address may begin."""
        from_there = sum(pending.host == host for pending in self._pending.values())
        return (
            len(self._pending) < min(MAX_PENDING, self._room // 2)
            and from_there < MAX_PENDING_PER_ADDRESS
            and len(self._pending) + len(self._members) < self._room
        )

    def _report_refusal(self, host: str, reason: str) -> None:
        self._refusals.report({"event": "refused", "reason": f"{host}: {reason}"})

    def _begin_handshake(self, connection: socket.socket, host: str) -> None:
        link = self._make_link()
        begun: list[bool] = []

        async def begin() -> None:
            begun.append(True)  # from here on `shake_hands` closes the socket
            await self._shake_hands(link, connection, host)

        def end(_: asyncio.Task[None]) -> None:
            if not begun:
                connection.close()

        self._pending[link] = _PendingPeer(host, asyncio.create_task(begin()))
        self._pending[link].beginning.add_done_callback(end)

    async def _shake_hands(self, link: Link, connection: socket.socket, host: str) -> None:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(HANDSHAKE):
                ready = await shake_hands(connection, self._bound.context, server=True)
        except ssl.SSLCertVerificationError as error:
            self._pending.pop(link, None)
            self._report_refusal(host, f"its certificate is not accepted: {error.verify_message}")
        except Exception as error:  # whatever a stranger does to TLS ends the stranger alone
            self._pending.pop(link, None)
            silent = isinstance(error, TimeoutError)
            reason = f"no TLS handshake within {HANDSHAKE:g} s" if silent else "no TLS handshake"
            self._report_refusal(host, reason)
        else:
            link.serve_connection(ready)


@contextmanager
def _naming_address(host: str, port: int) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"--bind {host}:{port}: {error.strerror or error}") from None


def _bind_sockets(
    places: set[tuple[socket.AddressFamily, tuple[str, int] | tuple[int, bytes]]],
) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for family, place in sorted(places):
            bound.append(_bind_socket(family, place))
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def _bind_socket(family: int, place: tuple[str, int] | tuple[int, bytes]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(place)
    except OSError:
        made.close()
        raise
    return made


def _count_free_descriptors() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = sum(1 for _ in Path("/dev/fd").iterdir())
    return limit - in_use if limit != resource.RLIM_INFINITY else 2**20
