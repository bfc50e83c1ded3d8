"""A defect in the coordinator ends it loudly: no port that listens while nothing moves."""

from __future__ import annotations

import logging
import socket
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.serving import (
    RememberingKeeper,
    ask_to_join,
    coordinator_of,
    serve,
)
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.transport import server
from trainer.optimizer.adamw import AdamW
from trainer.planning.budget.guard import BudgetStop


def broken(*_: Any, **__: Any) -> NoReturn:
    raise ZeroDivisionError("nobody expects this")


@pytest.mark.parametrize("callback", ["tick", "connected", "receive", "heard", "disconnected"])
def test_a_callback_that_raises_ends_the_run_with_a_last_checkpoint(
    callback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = coordinator_of(ExactProblem(exchange__heartbeat=0.2), applied=3)
    if callback == "disconnected":  # a peer that says nothing of sense is disconnected
        monkeypatch.setattr(Coordinator, "receive", lambda *_: [])
    monkeypatch.setattr(Coordinator, callback, broken)

    def peer(address: tuple[str, int]) -> None:
        with suppress(ConnectionError), socket.create_connection(address, timeout=20) as end:
            end.shutdown(socket.SHUT_WR)
            end.recv(1)

    with caplog.at_level(logging.ERROR):
        code, keeper = serve(machine, peer if callback == "disconnected" else ask_to_join)
    reason = "a defect in Motley: ZeroDivisionError: nobody expects this"
    assert code == 1
    assert keeper.end == (1, reason)
    assert [save.snapshot.step for save in keeper.saved] == [3]
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
        patch.setattr(np, "sqrt", broken)
        with pytest.raises(ZeroDivisionError):
            optimizer.apply(state, gradient, 0.1, 1.0)
    monkeypatch.setattr(Coordinator, "tick", broken)
    code, keeper = serve(machine)
    assert code == 1
    assert keeper.saved == []
    assert "no last checkpoint could be saved" in caplog.text
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
    _, keeper = serve(coordinator_of(problem))
    assert keeper.events[0] == {"event": "listening", "address": opened[0]}


def test_a_budget_ends_a_run_that_waits_for_workers() -> None:
    """They cost while they do not join, so the guard is asked without any event of the run."""
    machine = coordinator_of(ExactProblem(exchange__heartbeat=0.2), applied=3)

    class Poor(RememberingKeeper):
        def __init__(self) -> None:
            super().__init__()
            self.ending = BudgetStop("budget.ceiling: all is spent")

    code, keeper = serve(machine, keeper=Poor())
    assert (code, keeper.end) == (9, (9, "budget.ceiling: all is spent"))
    assert [save.snapshot.step for save in keeper.saved] == [3]
