"""What a stranger may cost: bounded in all, for each address, in descriptors and in lines."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.exchange.links import end_all, make_link, until
from trainer.exchange.transport import listener
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.listener import (
    MAX_PENDING,
    MAX_PENDING_PER_ADDRESS,
    Listener,
    bind_address,
)
from trainer.exchange.transport.refusals import INTERVAL, LINES, RefusalReporter

Door = tuple[Listener, list[Link], list[dict[str, Any]]]


@pytest.fixture
def clients() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for client in made:
        client.close()


def with_door(
    use: Callable[[Door], Awaitable[None]], context: ssl.SSLContext | None = None
) -> list[dict[str, Any]]:
    """Let a coroutine use a listener on loopback; links that are open are in its list."""
    events: list[dict[str, Any]] = []

    async def run() -> None:
        links: list[Link] = []
        refusals = RefusalReporter(events.append)

        def closed(link: Link, _: str) -> None:
            door.forget_link(link)
            links.remove(link)

        bound = replace(bind_address(("127.0.0.1", 0), None), context=context)
        door = Listener(bound, lambda: make_link(links.append, closed=closed), refusals)
        door.start()
        try:
            await use((door, links, events))
        finally:
            door.close()
            await end_all(links)

    asyncio.run(asyncio.wait_for(run(), 60))
    return events


async def knock(
    door: Listener, clients: list[socket.socket], count: int, source: str = "127.0.0.1"
) -> list[socket.socket]:
    """Open connections, and wait until the listener has seen them all."""
    before = len(clients)
    for _ in range(count):
        client = socket.socket()
        client.bind((source, 0))
        await asyncio.to_thread(client.connect, ("127.0.0.1", door._bound.port))
        clients.append(client)
    await asyncio.sleep(0.05)
    return clients[before:]


def test_one_address_cannot_crowd_another_out(clients: list[socket.socket]) -> None:
    async def use(given: Door) -> None:
        door, links, _ = given
        await knock(door, clients, 100)
        await until(lambda: len(links) == MAX_PENDING_PER_ADDRESS)
        (worker,) = await knock(door, clients, 1, "127.0.0.2")
        await until(lambda: any(link.peer.startswith("127.0.0.2:") for link in links))
        for source in range(3, 9):
            await knock(door, clients, MAX_PENDING_PER_ADDRESS, f"127.0.0.{source}")
        await until(lambda: len(links) == MAX_PENDING)
        worker.setblocking(False)
        with pytest.raises(BlockingIOError):
            worker.recv(1)

    events = with_door(use)
    assert len(events) <= 3 * LINES
    reason = "127.0.0.1: closed at once: too many connections have not joined"
    assert events[0] == {"event": "refused", "reason": reason}


def test_a_place_is_free_again_when_its_holder_is_gone(clients: list[socket.socket]) -> None:
    async def use(given: Door) -> None:
        door, links, _ = given
        first, *_ = await knock(door, clients, MAX_PENDING_PER_ADDRESS)
        await until(lambda: len(links) == MAX_PENDING_PER_ADDRESS)
        (refused,) = await knock(door, clients, 1)
        assert await asyncio.to_thread(refused.recv, 1) == b""
        first.close()
        await until(lambda: len(links) < MAX_PENDING_PER_ADDRESS)
        (newest,) = await knock(door, clients, 1)
        await until(lambda: len(links) == MAX_PENDING_PER_ADDRESS)
        newest.setblocking(False)
        with pytest.raises(BlockingIOError):
            newest.recv(1)

    with_door(use)


def test_a_silent_handshake_is_ended(
    clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE", 0.1)

    async def use(given: Door) -> None:
        door, links, _ = given
        (silent,) = await knock(door, clients, 1)
        assert await asyncio.to_thread(silent.recv, 1) == b""
        assert not links
        assert not door._pending

    (event,) = with_door(use, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    assert event["reason"] == "127.0.0.1: no TLS handshake within 0.1 s"


def test_members_do_not_count(clients: list[socket.socket]) -> None:
    async def use(given: Door) -> None:
        door, links, _ = given
        for _ in range(4):
            await knock(door, clients, MAX_PENDING_PER_ADDRESS)
            await until(lambda: len(links) % MAX_PENDING_PER_ADDRESS == 0)
            for link in links:
                door.admit_link(link)
        assert len(links) == 4 * MAX_PENDING_PER_ADDRESS

    assert with_door(use) == []


def test_descriptors_are_kept_back(
    clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use = len(list(Path("/dev/fd").iterdir()))
    limit = in_use + listener.RESERVED + 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))

    async def use(given: Door) -> None:
        door, links, _ = given
        for _ in range(3):
            await knock(door, clients, 20)
            assert len(door._pending) <= 10, "half of what is left may be strangers"
            assert len(links) <= 20
            for link in links[:5]:
                door.admit_link(link)

    with_door(use)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_an_accept_that_fails_rests_and_is_told(
    number: int, clients: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_REST", 0.1)
    calls: list[int] = []
    accept = socket.socket.accept

    def fail(listening: socket.socket) -> Any:
        calls.append(1)
        if len(calls) <= 3:
            raise OSError(number, os.strerror(number))
        return accept(listening)

    async def use(given: Door) -> None:
        door, links, _ = given
        monkeypatch.setattr(socket.socket, "accept", fail)
        await knock(door, clients, 1)
        await until(lambda: bool(links))

    events = with_door(use)
    assert len(calls) <= 5, "it does not spin"
    reason = f"this machine: not accepted ({os.strerror(number)})"
    assert events == 3 * [{"event": "refused", "reason": reason}]


def test_refusals_take_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now, events = 5.0, list[dict[str, Any]]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    refusals = RefusalReporter(events.append)
    for number in range(1000):
        refusals.report({"event": "refused", "reason": f"number {number}"})
    assert [event["reason"] for event in events] == [f"number {number}" for number in range(LINES)]
    now += INTERVAL
    for _ in range(2):
        refusals.report({"event": "refused", "reason": "one more"})
    reasons = [event["reason"] for event in events[LINES:]]
    assert reasons == [f"one more ({1000 - LINES} more before it)", "one more"]
