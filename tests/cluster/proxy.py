"""A TCP proxy that fails on request: what a home network does to a connection, at an exact byte."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Fault:
    """What happens to one connection; bytes are counted in `direction` (up: to the target)."""

    kind: Literal["cut", "truncate", "corrupt", "none"] = "none"
    at: int = 0
    direction: Direction = "up"


class FaultProxy:
    """Forwards connections to a port of this machine; each takes the next fault of `faults`.

    A fault whose byte never came (the connection ended before) waits for the next connection, so
    that each of them happens once, however the timing falls.
    """

    def __init__(
        self, target: int, *faults: Fault, listen: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self._target = target
        self._faults = list(faults)
        self.delay = 0.0
        """Seconds by which every piece comes later."""
        self.rate = 0.0
        """Bytes a second and direction; 0 for no limit."""
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._server = socket.create_server(listen)
        self._host = listen[0]
        self.port: int = self._server.getsockname()[1]
        self.happened: list[Fault] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"{self._host}:{self.port}"

    def freeze(self) -> None:
        """Make all connections half-open: nothing passes, nobody is told."""
        self._open.clear()

    def thaw(self) -> None:
        """Let everything pass again, what was held back included."""
        self._open.set()

    def cut(self) -> None:
        """Reset every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for end in sockets:
            _reset(end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self.thaw()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                target = socket.create_connection(("127.0.0.1", self._target), timeout=5)
            except OSError:
                client.close()
                continue
            target.settimeout(None)
            self.connections += 1
            with self._lock:
                fault = self._faults.pop(0) if self._faults else Fault()
                self._sockets += [client, target]
            arguments = (client, target, fault)
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, client: socket.socket, target: socket.socket, fault: Fault) -> None:
        """Forward both directions of a connection until both have ended."""
        up, down = (fault if fault.direction == way else Fault() for way in ("up", "down"))
        back = threading.Thread(target=self._forward, args=(target, client, down), daemon=True)
        back.start()
        self._forward(client, target, up)
        back.join()
        with self._lock:
            self._sockets = [end for end in self._sockets if end not in (client, target)]
        client.close()
        target.close()

    def _forward(self, source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(16384)):
                self._open.wait()
                if self.delay:
                    time.sleep(self.delay)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                here = fault.at - passed
                passed += len(data)
                if fault.kind != "none" and 0 <= here < len(data):
                    self.happened.append(fault)
                    if fault.kind == "corrupt":
                        data[here] ^= 0xFF
                    else:
                        sink.sendall(data[:here])
                        (_reset if fault.kind == "cut" else _finish)(sink)
                        _reset(source)
                        return
                sink.sendall(data)
        if fault.kind != "none" and fault not in self.happened:
            with self._lock:
                self._faults.insert(0, fault)
        _finish(sink)


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _finish(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_WR)
