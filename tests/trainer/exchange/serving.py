"""A GradientServer in this process, with a supervisor that remembers, and a peer in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.trainer.exchange.exact_problem import JOB, ExactProblem, join_request
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import Save, Step
from trainer.exchange.protocol.wire import FrameEncoder, run_tag
from trainer.exchange.transport.listener import bind_address
from trainer.exchange.transport.server import GradientServer
from trainer.system.errors import TrainerError


class MemoryRecorder:
    """A recorder that stores in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.saved: list[Save] = []
        self.end: tuple[int, str] | None = None
        self.failure: TrainerError | None = None
        self.ending: str | None = None

    def emit(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def log_step(self, event: Step) -> None:
        self.emit({"event": "step", **vars(event)})

    def save(self, save: Save) -> None:
        self.saved.append(save)

    def close(self, exit_code: int, reason: str) -> int:
        self.end = (exit_code, reason)
        return exit_code


def coordinator_of(problem: ExactProblem, applied: int = 0) -> Coordinator:
    """Return a coordinator that waits for a worker, with so many updates since the last save."""
    made = problem.coordinator(1, time.monotonic())
    made.training.state.step += applied
    return made


def serve(
    machine: Coordinator,
    peer: Callable[[tuple[str, int]], None] | None = None,
    recorder: MemoryRecorder | None = None,
) -> tuple[int, MemoryRecorder]:
    """Serve on loopback until the run ends, with a peer that gets the address."""
    recorder = recorder or MemoryRecorder()
    server = GradientServer(machine, recorder, bind_address(("127.0.0.1", 0), None))
    threads: list[threading.Thread] = []

    def listening() -> None:
        if peer:
            threads.append(threading.Thread(target=peer, args=(("127.0.0.1", server.port),)))
            threads[0].start()

    code = server.run(listening)
    for thread in threads:
        thread.join(20)
    return code, recorder


def ask_to_join(address: tuple[str, int]) -> None:
    """Send a request to join and wait for the end of the connection."""
    with suppress(ConnectionError), socket.create_connection(address, timeout=20) as end:
        request = join_request(0).to_frame(0)
        end.sendall(b"".join(FrameEncoder(run_tag(JOB.run_id)).encode(request)))
        while end.recv(65536):
            pass
