"""Whether workers can connect to the coordinator's address, and how fast; run on both ends.

The coordinator's host listens where the coordinator will (`listen`), every other host connects
where its worker will (`connect`). A token proves that both ends belong to this check; then a
short burst each way measures the link, which also finds a path that drops large packets.

On the wire: the client's hello line, `ok`, then one client after the other (so that they do not
measure each other): `go`, the client's burst, `had`, the server's burst, `bye`.
A burst is frames of a 4-byte big-endian length and as many bytes, ended by an empty one.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import struct
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import cast

from launcher.agent.checks.host import check_port
from launcher.agent.operation import operation

BURST = 4 << 20
"""Bytes of a burst: a gradient of a small LoRA."""
BURST_TIME = 0.7
"""Seconds after which a burst ends early on a slow link."""

_FRAME = 64 << 10
_HELLO_LIMIT = 1 << 10
_RETRY = 0.05
_STALL = 3.0
"""Seconds without a byte after which a burst counts as lost."""


@dataclass(frozen=True)
class ListenResult:
    """The result on the coordinator's end."""

    problem: str = ""
    """Why it could not listen; empty when it did."""
    remedy: str = ""
    connected: tuple[str, ...] = ()
    """The hosts that connected."""


@dataclass(frozen=True)
class ProbeResult:
    """The result on a worker's end. Speeds are in bit/s, times in s; None: not measured."""

    stage: str
    """Last stage: `refused`, `silent`, `unreachable`, `unauthenticated`, `up`, `down`, `done`."""
    detail: str = ""
    round_trip: float | None = None
    upload_rate: float | None = None
    """Speed towards the coordinator."""
    download_rate: float | None = None


@operation("listen", least=0)
def listen(
    address: str, port: int, token: str, peers: Sequence[str], deadline: float
) -> ListenResult:
    """Listen until every peer has connected and finished, or `deadline` seconds have passed."""
    until = time.monotonic() + deadline
    link_server = _LinkServer(token, peers, until)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Not checked before: a child that another thread forks may hold that socket a while.
        server = socket.create_server((address, port), family=family, backlog=64)
    except OSError as error:
        why = check_port(address, port)
        if why.status == "fail":
            return ListenResult(why.detail, why.remedy)
        return ListenResult(f"port {port} on {address}: {error.strerror}")
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        while not link_server.is_done() and time.monotonic() < until:
            if not selector.select(_RETRY):
                continue
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                threading.Thread(
                    target=link_server.serve_client, args=(client,), daemon=True
                ).start()
    return ListenResult(connected=tuple(sorted(link_server.connected)))


class _LinkServer:
    """The clients of the listening end."""

    def __init__(self, token: str, peers: Sequence[str], until: float) -> None:
        self.connected: set[str] = set()
        self._token = token
        self._expected = set(peers)
        self._gone: set[str] = set()
        self._until = until
        self._turn = threading.Lock()

    def is_done(self) -> bool:
        return self._expected <= self._gone

    def serve_client(self, client: socket.socket) -> None:
        """Serve one client; a client without the token is disconnected."""
        name = ""
        with client, contextlib.suppress(OSError, ValueError):
            client.settimeout(_STALL)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello: object = json.loads(_read_line(client))
            fields = cast("dict[str, object]", hello) if isinstance(hello, dict) else {}
            if not hmac.compare_digest(str(fields.get("token")).encode(), self._token.encode()):
                return
            name = str(fields.get("name"))
            client.sendall(b"ok\n")
            self.connected.add(name)
            if self._turn.acquire(timeout=max(0.0, self._until - time.monotonic())):
                try:
                    _serve_bursts(client)
                finally:
                    self._turn.release()
        self._gone.add(name)


def _serve_bursts(client: socket.socket) -> None:
    client.sendall(b"go\n")
    _take_burst(client)
    client.sendall(b"had\n")
    _send_burst(client)
    _read_line(client)


@operation("connect", least=0)
def connect(address: str, port: int, token: str, name: str, deadline: float) -> ProbeResult:
    """Connect as a worker will, and measure; retries until the other end listens.

    `address` may be a host name: then it is resolved here, as the worker will do.
    """
    until = time.monotonic() + deadline
    while True:
        crossing = _probe_link(address, port, token, name, until)
        again = crossing.stage in ("refused", "unauthenticated", "unreachable")
        if not again or time.monotonic() + _RETRY > until:
            return crossing
        time.sleep(_RETRY)


def _probe_link(address: str, port: int, token: str, name: str, until: float) -> ProbeResult:
    began = time.monotonic()
    try:
        link = socket.create_connection((address, port), timeout=max(0.1, until - began))
    except TimeoutError:
        return ProbeResult("silent", "no answer to a connection")
    except ConnectionRefusedError:
        return ProbeResult("refused", "connection refused")
    except OSError as error:
        return ProbeResult("unreachable", (error.strerror or str(error)).lower())
    round_trip = time.monotonic() - began
    up: float | None = None
    stage = "unauthenticated"
    with link:
        try:
            link.settimeout(max(0.1, until - time.monotonic()))
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(json.dumps({"token": token, "name": name}).encode() + b"\n")
            if _read_line(link) != b"ok":
                return ProbeResult("unauthenticated", "another program answers there")
            stage = "done"  # connected; the measurement may still not take place
            _read_line(link)
            stage = "up"
            link.settimeout(_STALL)
            began = time.monotonic()
            sent = _send_burst(link)
            _read_line(link)
            up = 8 * sent / max(1e-6, time.monotonic() - began)
            stage = "down"
            down = _take_burst(link)
            link.sendall(b"bye\n")
        except (OSError, ValueError) as error:
            problem = (
                "another program answers there"
                if stage == "unauthenticated"
                else _describe_stall(error)
            )
            return ProbeResult(stage, problem, round_trip, up)
    return ProbeResult("done", "", round_trip, up, down)


def _send_burst(link: socket.socket) -> int:
    """Send until the burst is complete or its time is over; return its size."""
    frame = struct.pack(">I", _FRAME) + bytes(_FRAME)
    began = time.monotonic()
    sent = 0
    while sent < BURST and time.monotonic() - began < BURST_TIME:
        link.sendall(frame)
        sent += _FRAME
    link.sendall(struct.pack(">I", 0))
    return sent


def _take_burst(link: socket.socket) -> float:
    """Read a burst to its end; return its speed in bit/s."""
    began = time.monotonic()
    size = 0
    while length := struct.unpack(">I", _read_exactly(link, 4))[0]:
        if length > _FRAME or size > BURST:
            raise ValueError("not a burst")
        size += len(_read_exactly(link, length))
    return 8 * size / max(1e-6, time.monotonic() - began)


def _read_exactly(link: socket.socket, count: int) -> bytes:
    return b"".join(_probe_chunks(link, count))


def _probe_chunks(link: socket.socket, count: int) -> Generator[bytes]:
    while count:
        piece = link.recv(count)
        if not piece:
            raise ConnectionError("closed")
        count -= len(piece)
        yield piece


def _read_line(link: socket.socket) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        if len(line) > _HELLO_LIMIT:
            raise ValueError("not a line")
        line += _read_exactly(link, 1)
    return bytes(line[:-1])


def _describe_stall(error: Exception) -> str:
    return "it stalled" if isinstance(error, TimeoutError) else str(error)
