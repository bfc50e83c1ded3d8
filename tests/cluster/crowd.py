"""A crowd of connections that never become members: idle ones, and some that began TLS."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Literal, Self

Kind = Literal["idle", "half-TLS"]


def client_hello() -> bytes:
    """Return the first record of a TLS handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("a handshake without an answer")


class Crowd:
    """Opens connections to a port of this machine, `rate` a second, alternately of each kind.

    It holds each until the other side closes it, at most `held` at a time, and ends by itself after
    `count` connections.
    """

    def __init__(self, port: int, *, count: int, rate: float, held: int, kinds: list[Kind]) -> None:
        self.opened = 0
        """Connections that the other side's kernel took."""
        self.done = threading.Event()
        self._port, self._count, self._rate, self._held = port, count, rate, held
        self._kinds = kinds
        self._hello = client_hello()
        self._leaving = threading.Event()
        self._sockets: dict[int, socket.socket] = {}
        self._thread = threading.Thread(target=self._crowd, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(30)
        for end in self._sockets.values():
            end.close()

    def _crowd(self) -> None:
        watch = select.epoll()
        began = time.monotonic()
        with watch:
            while self.opened < self._count and not self._leaving.is_set():
                due = int((time.monotonic() - began) * self._rate) - self.opened
                for _ in range(min(due, self._held - len(self._sockets))):
                    if not self._open(watch):
                        break
                for number, _ in watch.poll(0.01):
                    self._read(number, watch)
        self.done.set()

    def _open(self, watch: select.epoll) -> bool:
        end = socket.socket()
        end.settimeout(1)
        try:
            end.connect(("127.0.0.1", self._port))
            if self._kinds[self.opened % len(self._kinds)] == "half-TLS":
                end.send(self._hello)
        except OSError:
            end.close()
            return False
        end.setblocking(False)
        self.opened += 1
        self._sockets[end.fileno()] = end
        watch.register(end, select.EPOLLIN | select.EPOLLHUP)
        return True

    def _read(self, number: int, watch: select.epoll) -> None:
        end = self._sockets[number]
        try:
            if end.recv(65536):
                return
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return
        watch.unregister(number)
        self._sockets.pop(number).close()


def resident(pid: int) -> int:
    """Return the bytes of memory that a process holds now."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
