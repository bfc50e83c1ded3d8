"""The dashboard stays reachable and ends when it is told, whatever its clients do."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.launcher.views.dashboard.serving import Server, serving
from tests.waiting import PATIENCE, wait_for

# Its own limits, shorter.
PROGRAM = (
    "import launcher.views.dashboard.connections as c; {}\nfrom launcher.cli import main; main()"
)
IMPATIENT = PROGRAM.format("c.PATIENCE, c.STALL, c.MOST = 0.5, 0.5, 6")
NARROW = PROGRAM.format("c.MOST = 6")
STREAM = b"GET /api/overview/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path, program=(sys.executable, "-c", IMPATIENT)) as server:
        yield server


def connected(server: Server) -> socket.socket:
    at = urlsplit(server.url)
    return socket.create_connection((str(at.hostname), int(at.port or 0)), PATIENCE)


def sockets(server: Server) -> int:
    found = 0
    for link in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found += str(link.readlink()).startswith("socket:")
    return found


def read_to_end(stream: socket.socket) -> bytes:
    """Return what comes until the server ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := stream.recv(1 << 16):
            found += part
    return found


def trickle(stream: socket.socket) -> bytes:
    """Send a byte now and then until the server ends the connection; return what it answered."""
    stream.settimeout(0.1)
    found = b""
    with contextlib.suppress(ConnectionError):
        while True:
            stream.send(b"x")
            try:
                part = stream.recv(1 << 16)
            except TimeoutError:
                continue
            if not part:
                break
            found += part
    return found


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2500:
        pytest.skip("needs 2,500 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2500, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("bind", ["127.0.0.1", "0.0.0.0"])
def test_idle_connections_keep_no_one_out(tmp_path: Path, bind: str) -> None:
    """On an address of others they have not even begun TLS."""
    with serving(tmp_path, "--bind", bind, "--port", "0") as server, contextlib.ExitStack() as held:
        if bind == "0.0.0.0":
            at = urlsplit(server.url)
            server = Server(f"https://localhost:{at.port}{at.path}", server.process, server.context)
        assert server.get("api/overview")[0] == 200
        for _ in range(1100):
            held.enter_context(connected(server))
        assert server.get("api/overview")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)


def test_headers_that_never_end_end(impatient: Server) -> None:
    with connected(impatient) as stream:
        stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ")
        assert trickle(stream) == b""
    with connected(impatient) as stream:
        assert read_to_end(stream) == b""  # without a byte


def test_a_body_that_never_ends_ends_after_its_answer(impatient: Server) -> None:
    with connected(impatient) as stream:
        stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert trickle(stream).startswith(b"HTTP/1.1 200")


def test_a_connection_is_used_again_in_time(impatient: Server) -> None:
    with connected(impatient) as stream:
        request = b"GET /api/overview HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stream.send(request * 3)  # at once
        assert read_to_end(stream).count(b"HTTP/1.1 200") == 3


def test_a_reader_that_stops_is_left(impatient: Server) -> None:
    with connected(impatient) as stream:  # the server has all that it keeps when it has answered
        stream.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_to_end(stream).startswith(b"HTTP/1.1 200")
    before = sockets(impatient)
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        at = urlsplit(impatient.url)
        stream.connect((at.hostname, at.port))
        stream.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            for _ in range(400):  # more than the kernel keeps
                stream.send(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: sockets(impatient) <= before, "the connection's end")


def test_of_many_streams_the_oldest_gives_way(tmp_path: Path) -> None:
    program = (sys.executable, "-c", NARROW)
    with serving(tmp_path, program=program) as server, contextlib.ExitStack() as held:
        streams = [held.enter_context(connected(server)) for _ in range(6)]
        for stream in streams:
            stream.send(STREAM)
            assert stream.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert server.get("api/overview")[0] == 200
        read_to_end(streams[0])
        assert b":" in streams[1].recv(1 << 16)  # goes on
        assert b":" in streams[-1].recv(1 << 16)


def test_streams_and_stopped_readers_do_not_delay_the_end(tmp_path: Path) -> None:
    with serving(tmp_path) as server, contextlib.ExitStack() as held:
        for _ in range(20):
            stream = held.enter_context(connected(server))
            stream.send(STREAM)
            assert stream.recv(1 << 16)
        stopped = held.enter_context(connected(server))
        stopped.send(b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(PATIENCE)
