"""Discovery of the processes of a run on one host: a Unix socket, and credentials for a key.

The socket has an abstract name: no file, seen only inside its network namespace, and it
ends with the process. Both ends must run as the same user, which the kernel reports to each; that
user could read the keys of TLS and the memory of both processes anyway. The coordinator then passes
the descriptors of shared memory. If anything fails here, TCP is used.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from trainer.exchange.transport.link import Link
from trainer.exchange.transport.shared_memory import Averages, WorkerEnd, is_supported
from trainer.exchange.transport.sockets import wait_until_readable

log = logging.getLogger(__name__)

_GREETING = struct.Struct("<Q")
"""The bytes of one encoded gradient: what both sides are about to map."""
_CREDENTIALS = struct.Struct("iII")
_BACKLOG = 64
_WAIT = 2.0
"""Seconds that a worker waits for the greeting."""


class SameHostListener:
    """Accepts workers of this host and of this user."""

    def __init__(self, name: bytes, sizes: Sequence[int], make_link: Callable[[], Link]) -> None:
        """Make the shared memory and bind; `start` accepts.

        Raises:
            OSError: the system refuses one of them, or the name is taken.
        """
        if not is_supported():
            raise OSError("this system cannot seal anonymous files")
        self.averages = Averages(sizes)
        """The averages that the workers read."""
        self._greeting = _GREETING.pack(sum(sizes))
        self._make_link = make_link
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(name)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            os.close(self.averages.descriptor)
            raise

    def start(self) -> None:
        """Accept from now on."""
        asyncio.get_running_loop().add_reader(self._socket, self._accept_worker)

    def close(self) -> None:
        """Accept no more."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        os.close(self.averages.descriptor)

    def _accept_worker(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        try:
            connection.setblocking(False)
            if not _is_same_user(connection):
                connection.close()
                return
            end, descriptors = self.averages.open_connection()
            try:
                socket.send_fds(connection, [self._greeting], descriptors)
            finally:
                os.close(descriptors[1])
        except OSError as error:
            log.warning("a worker of this host has to use TCP: %s", error)
            connection.close()
            return
        self._make_link().serve_connection(connection, end)


async def connect_same_host(
    address: tuple[str, int], run: int, sizes: Sequence[int]
) -> tuple[socket.socket, WorkerEnd] | None:
    """Return a connection to the coordinator if it runs on this host, as the same user."""
    host, port = address
    if not is_supported() or not await _is_local_address(host):
        return None
    name = make_socket_name(port, run)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    received: list[int] = []
    try:
        connection.setblocking(False)
        connection.connect(name)
        if not _is_same_user(connection):
            raise PermissionError("another user listens there")
        async with asyncio.timeout(_WAIT):
            await wait_until_readable(connection)
        greeting, received, _, _ = socket.recv_fds(connection, _GREETING.size, 2)
        if greeting != _GREETING.pack(sum(sizes)) or len(received) != 2:
            raise ValueError("its gradient has another size")
        return connection, WorkerEnd(sizes, *received)
    except (OSError, ValueError) as error:
        log.debug("no shared memory at %r: %s", name, error)
        connection.close()
        return None
    except BaseException:
        connection.close()
        raise
    finally:
        for descriptor in received:
            os.close(descriptor)


def make_socket_name(port: int, run: int) -> bytes:
    """Return the name under which this user's coordinator of a run is found."""
    return b"\0motley-%d-%d-%08x" % (os.geteuid(), port, run)


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user == os.geteuid()


async def _is_local_address(host: str) -> bool:
    """Return whether an address is one of this host's: only those can be bound to."""
    with suppress(OSError):
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, place in found:
            with suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.bind(place)
                return True
    return False
