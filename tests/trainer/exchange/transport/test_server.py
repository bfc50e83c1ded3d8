"""A defect in the coordinator ends it loudly: no port that listens while nothing moves."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.serving import (
    MemoryRecorder,
    ask_to_join,
    coordinator_of,
    serve,
)
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import Action, ApplyUpdate, Finish
from trainer.exchange.protocol.wire import MAX_PAYLOAD, Frame, MessageType
from trainer.exchange.transport import server
from trainer.exchange.transport.link import Link
from trainer.exchange.transport.server import GradientServer
from trainer.optimizer.adamw import AdamW
from trainer.system.passes import compiled_library


def broken(*_: Any, **__: Any) -> NoReturn:
    raise ZeroDivisionError("nobody expects this")


@pytest.mark.parametrize(
    "callback",
    ["tick", "add_connection", "receive_frame", "record_activity", "remove_connection"],
)
def test_a_callback_that_raises_ends_the_run_with_a_last_checkpoint(
    callback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = coordinator_of(ExactProblem(exchange__heartbeat=0.2), applied=3)
    if callback == "remove_connection":  # a peer that says nothing of sense is disconnected
        monkeypatch.setattr(Coordinator, "receive_frame", lambda *_: [])
    monkeypatch.setattr(Coordinator, callback, broken)

    def peer(address: tuple[str, int]) -> None:
        with suppress(ConnectionError), socket.create_connection(address, timeout=20) as end:
            end.shutdown(socket.SHUT_WR)
            end.recv(1)

    with caplog.at_level(logging.ERROR):
        code, recorder = serve(machine, peer if callback == "remove_connection" else ask_to_join)
    reason = "a defect in Motley: ZeroDivisionError: nobody expects this"
    assert code == 1
    assert recorder.end == (1, reason)
    assert [save.snapshot.step for save in recorder.saved] == [3]
    assert f"the run ends: {reason}" in caplog.text
    assert "Traceback" in caplog.text


def test_a_state_that_is_neither_is_not_saved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = ExactProblem(exchange__heartbeat=0.2)
    machine = coordinator_of(problem, applied=3)
    state = machine.training.state
    gradient = np.ones(problem.layout.size, np.float32)
    optimizer = AdamW(problem.config.optimizer, problem.layout)
    with monkeypatch.context() as patch:
        patch.setattr(compiled_library, "PASSES", None)
        patch.setattr(np, "sqrt", broken)
        with pytest.raises(ZeroDivisionError):
            optimizer.apply(state, gradient, 0.1, 1.0)
    monkeypatch.setattr(Coordinator, "tick", broken)
    code, recorder = serve(machine)
    assert code == 1
    assert recorder.saved == []
    assert "the final checkpoint could not be saved" in caplog.text
    assert "broke off in the middle" in caplog.text


def test_shared_memory_is_open_before_tcp(
    problem: ExactProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that came between the two would stay on TCP for as long as it is connected."""
    opened: list[str] = []

    class Opening(server.SameHostListener):
        def __init__(self, name: bytes, *others: Any) -> None:
            port = int(name.split(b"-")[2])
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=20)
            super().__init__(name, *others)
            opened.append(f"127.0.0.1:{port}")

    monkeypatch.setattr(server, "SameHostListener", Opening)
    monkeypatch.setattr(Coordinator, "tick", broken)
    _, recorder = serve(coordinator_of(problem))
    assert recorder.events[0] == {"event": "listening", "address": opened[0]}


def test_the_update_waits_until_averages_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop would serve no socket meanwhile: the wire of a remote worker would be idle."""
    machine = coordinator_of(ExactProblem())
    links: list[Link] = []
    applied: list[tuple[bool, float]] = []
    payload = bytes(MAX_PAYLOAD)
    stuffed = threading.Event()

    introduce = GradientServer._on_opened

    def opened(server: GradientServer, link: Link) -> None:
        """Queue more than a socket takes, and then what a commit asks for."""
        introduce(server, link)
        links.append(link)
        link.send([Frame(MessageType.STATE, payload) for _ in range(16)])
        server._perform_actions([ApplyUpdate()])
        stuffed.set()

    def apply_update(_: Coordinator, now: float) -> list[Action]:
        applied.append((links[0].is_idle, now))
        return [Finish(0, "seen")]

    def peer(address: tuple[str, int]) -> None:
        with socket.create_connection(address, timeout=20) as end:
            assert stuffed.wait(20)
            time.sleep(0.05)  # the loop goes round meanwhile
            before.append(len(applied))
            while end.recv(1 << 20):
                pass

    before: list[int] = []
    monkeypatch.setattr(GradientServer, "_on_opened", opened)
    monkeypatch.setattr(Coordinator, "apply_update", apply_update)
    assert serve(machine, peer)[0] == 0
    assert before == [0]
    assert [idle for idle, _ in applied] == [True]


def test_a_budget_ends_a_run_that_waits_for_workers() -> None:
    """They cost while they do not join, so the guard is asked without any event of the run."""
    machine = coordinator_of(ExactProblem(exchange__heartbeat=0.2), applied=3)

    class Poor(MemoryRecorder):
        def __init__(self) -> None:
            super().__init__()
            self.ending = "budget.ceiling: all is spent"

    code, recorder = serve(machine, recorder=Poor())
    assert (code, recorder.end) == (9, (9, "budget.ceiling: all is spent"))
    assert [save.snapshot.step for save in recorder.saved] == [3]
