"""Sockets of the exchange: connected, tuned, and with TLS complete, without blocking the loop."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

HANDSHAKE = 5.0
"""Seconds that a TLS handshake may take."""
_SEND_BUFFER = 256 * 1024
"""Bytes in flight and unsent of one connection: enough for 1 Gbit/s over 2 ms."""
_CONGESTION = (b"cubic", b"reno")
"""In this order. BBR, which some hosts default to, paces our bursts by a bandwidth that it measured
while others shared the link, and lets workers drift apart: 1.30 of the wire's limit, not 1.1."""


async def connect_host(host: str, port: int) -> socket.socket:
    """Return a connection to the first address of a host that accepts one.

    Raises:
        OSError: none does.
    """
    loop = asyncio.get_running_loop()
    refused: OSError | None = None
    for family, kind, protocol, _, place in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, place)
        except OSError as error:
            connection.close()
            refused = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    assert refused is not None  # a name without an address is an error of `getaddrinfo`
    raise refused


async def shake_hands(
    connection: socket.socket, context: ssl.SSLContext | None, *, server: bool
) -> socket.socket:
    """Return a connected socket that is ready for frames, after the TLS handshake if any.

    Raises:
        OSError: TLS failed (`ssl.SSLError`), or the connection broke; it is closed.
    """
    loop = asyncio.get_running_loop()
    try:
        _set_socket_options(connection)
        if context is None:
            return connection
        connection = context.wrap_socket(
            connection, server_side=server, do_handshake_on_connect=False
        )
        while True:
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                await wait_until_readable(connection)
            except ssl.SSLWantWriteError:
                await _wait_until_ready(connection, loop.add_writer, loop.remove_writer)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


def describe_peer(connection: socket.socket) -> str:
    """Return the peer's address."""
    if connection.family == socket.AF_UNIX:
        return "this machine"
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "a disconnected peer"
    return f"{host}:{port}"


async def wait_until_readable(connection: socket.socket) -> None:
    """Wait until a socket has bytes, or its end."""
    loop = asyncio.get_running_loop()
    await _wait_until_ready(connection, loop.add_reader, loop.remove_reader)


async def _wait_until_ready(
    connection: socket.socket,
    add: Callable[..., None],
    remove: Callable[[socket.socket], object],
) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(connection, set_ready)
    try:
        await ready
    finally:
        remove(connection)


def _set_socket_options(connection: socket.socket) -> None:
    """Keep members abreast that share a link: an average waits for the last of them.

    A short send buffer keeps the queues on the way short; in long ones the acknowledgements of the
    other direction wait, and uploads drift apart. And no congestion control such as BBR, which
    shares a link badly; Linux only, and a process without root may choose what
    `tcp_allowed_congestion_control` lists. Measured: the send
    buffer in docs/decisions.md, congestion control at `_CONGESTION`.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    option: int | None = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        return
    for name in _CONGESTION:
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, name)
            return
