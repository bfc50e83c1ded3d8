"""Calls that come when the loop of another thread has just ended: dropped; the end is reported."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import JOB, ExactProblem, join_request
from tests.trainer.exchange.serving import MemoryRecorder, coordinator_of
from trainer.exchange.protocol.messages import ShardAssignment, Shutdown
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.transport.client import WorkerClient
from trainer.exchange.transport.listener import bind_address
from trainer.exchange.transport.reading_reporter import ReadingReporter
from trainer.exchange.transport.server import GradientServer
from trainer.exchange.worker.session import Event, Session
from trainer.system.errors import InputError
from trainer.system.process.stop_signals import stop_signals

CODE = InputError.exit_code


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The signals' handlers of before, after a server has installed its own."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make_server(problem: ExactProblem) -> GradientServer:
    return GradientServer(
        coordinator_of(problem), MemoryRecorder(), bind_address(("127.0.0.1", 0), None)
    )


def serve_with(server: GradientServer, peer: Callable[[], None]) -> int:
    """Serve until the run ends, with a peer in a thread."""
    thread = threading.Thread(target=peer)
    code = server.run(thread.start)
    thread.join(20)
    assert not thread.is_alive()
    return code


class LateClient(WorkerClient):
    """Sends when the run and its thread have ended since it looked whether it is a member."""

    end_run: Callable[[], None]
    sent = 0

    def _post_frames(self, session: Session, frames: Iterable[Frame]) -> None:
        self.end_run()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.sent += 1
        super()._post_frames(session, frames)


def test_what_a_worker_sends_after_the_end_is_dropped() -> None:
    problem = ExactProblem()
    server, layout = make_server(problem), problem.make_layout()
    ends: list[Event | None] = []

    def work() -> None:
        address = ("127.0.0.1", server.port)
        client = LateClient(
            address, join_request(0), layout, codec="fp32", folder=None, patience=20.0
        )
        while not isinstance(event := client.next_event(), ShardAssignment):
            pass
        client.end_run = lambda: server.halt(InputError("the run ends now"))
        client.send_block(event, 0, np.zeros(layout.blocks[0].size, np.float32), 1)
        assert client.sent == 1
        ends.append(client.next_event())
        client.close("the worker ends")

    assert serve_with(server, work) == CODE
    assert ends == [Shutdown(reason="the run ends now", exit_code=CODE)]


def test_a_run_that_has_ended_can_be_halted_and_stopped() -> None:
    server = make_server(ExactProblem())
    assert server.run(lambda: server.halt(InputError("a worker cannot start"))) == CODE
    server.halt(InputError("another cannot start either"))
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_reporter_that_was_refused_ends_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(ExactProblem())
    ended: list[bool] = []

    def read() -> None:
        address = ("127.0.0.1", server.port)
        with ReadingReporter(address, f"not-{JOB.run_id}", None, None) as reporter:
            reporter._thread.join(20)
            ended.append(not reporter._thread.is_alive())
        server.halt(InputError("the run ends now"))

    assert serve_with(server, read) == CODE
    assert ended == [True]
    assert "no longer reported" not in caplog.text
