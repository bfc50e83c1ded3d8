"""The link check over real sockets: both ends, strangers, silence, and a path that stalls."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from launcher.agent.checks import link as link_checks
from launcher.agent.checks.link import BURST, ListenResult, ProbeResult, connect, listen
from tests.ports import free_port

PATIENCE = 30.0


def meet(
    peers: Sequence[str], address: str = "127.0.0.1", token: str = "t1"
) -> tuple[ListenResult, list[ProbeResult]]:
    port = free_port(address)
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(listen, address, port, token, peers, PATIENCE)
        crossings = [pool.submit(connect, address, port, token, n, PATIENCE) for n in peers]
        return heard.result(), [crossing.result() for crossing in crossings]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_both_ends_find_each_other_and_measure(address: str) -> None:
    heard, crossings = meet(["intel", "lambda"], address)
    assert heard == ListenResult(connected=("intel", "lambda"))
    for crossing in crossings:
        assert crossing.stage == "done"
        assert crossing.upload_rate is not None
        assert crossing.download_rate is not None
        assert crossing.upload_rate > 0
        assert crossing.download_rate > 0


def test_a_worker_may_come_before_the_listener() -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        early = pool.submit(connect, "127.0.0.1", port, "t", "lambda", PATIENCE)
        while not early.running():
            pass
        assert listen("127.0.0.1", port, "t", ["lambda"], PATIENCE).connected == ("lambda",)
        assert early.result().stage == "done"


def test_a_busy_port_is_said_by_the_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        heard = listen("127.0.0.1", port, "t", ["lambda"], PATIENCE)
    assert f"port {port} on 127.0.0.1 is in use" in heard.problem
    assert f"motley_port={port + 1}" in heard.remedy


def test_a_child_that_another_thread_forks_takes_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it executes its program, the child holds every socket that was open at its fork."""
    held: list[int] = []

    def fork_now(opened: socket.socket, *backlog: int) -> None:
        opens(opened, *backlog)
        held.append(os.dup(opened.fileno()))

    port, opens = free_port(), socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", fork_now)
    try:
        assert listen("127.0.0.1", port, "t", ["lambda"], 0.1) == ListenResult()
        assert held
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_nobody_there_is_refused() -> None:
    crossing = connect("127.0.0.1", free_port(), "t", "lambda", 0.2)
    assert (crossing.stage, crossing.detail) == ("refused", "connection refused")


def test_a_name_that_does_not_resolve() -> None:
    assert connect("no-such-host.invalid", 9000, "t", "lambda", 0.2).stage == "unreachable"


def answering(serve: Callable[[socket.socket], None]) -> tuple[int, threading.Thread]:
    """Listen on a port and serve the first client."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with server:
            client, _ = server.accept()
            with client:
                serve(client)

    thread = threading.Thread(target=run)
    thread.start()
    return server.getsockname()[1], thread


def test_something_else_on_that_port() -> None:
    port, thread = answering(lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n"))
    crossing = connect("127.0.0.1", port, "t", "lambda", 0.2)
    thread.join()
    assert crossing.stage in (
        "unauthenticated",
        "refused",
    )  # refused: it was gone at the second try


def test_a_peer_without_the_token_is_ignored() -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        heard = pool.submit(listen, "127.0.0.1", port, "right", ["lambda"], PATIENCE)
        for spoken in (b"GET / HTTP/1.1\r\n", b"{}\n", b'{"token": "wrong", "name": "lambda"}\n'):
            assert said_back(port, spoken) == b""
        connect("127.0.0.1", port, "right", "lambda", PATIENCE)
        assert heard.result().connected == ("lambda",)


def said_back(port: int, spoken: bytes) -> bytes:
    until = threading.Event()
    while not until.is_set():
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as link:
                link.sendall(spoken)
                link.shutdown(socket.SHUT_WR)
                return link.recv(100)
        except ConnectionRefusedError:
            until.wait(0.01)  # the listener is not there yet
        except ConnectionResetError:
            return b""
    return b""


@pytest.mark.parametrize("stage", ["up", "down"])
def test_a_path_that_loses_large_packets_names_the_direction(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small messages pass, bursts do not: what a wrong MTU on the way looks like."""
    monkeypatch.setattr(link_checks, "_STALL", 0.2)
    over: Future[None] = Future()

    def serve(client: socket.socket) -> None:
        client.recv(1000)
        client.sendall(b"ok\ngo\n")
        if stage == "down":
            left = BURST
            while left > 0:
                left -= len(client.recv(1 << 20))
            client.sendall(b"had\n")
        over.result(PATIENCE)

    port, thread = answering(serve)
    crossing = connect("127.0.0.1", port, "t", "lambda", PATIENCE)
    over.set_result(None)
    thread.join()
    assert (crossing.stage, crossing.detail) == (stage, "it stalled")
    assert crossing.round_trip is not None
