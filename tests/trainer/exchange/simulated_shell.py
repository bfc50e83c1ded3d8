"""The shell around a simulated coordinator: its links, its workers' processes, its disk."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.trainer.exchange.bystander import Bystander
from tests.trainer.exchange.exact_problem import JOB, ExactProblem
from tests.trainer.exchange.simulated_worker import SimulatedWorker, Wire
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import (
    Action,
    ApplyUpdate,
    Close,
    Emit,
    Finish,
    Save,
    Send,
    Step,
)
from trainer.exchange.protocol.members import RefusalError
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.worker.session import Session
from trainer.system.errors import ProtocolError

FLUSH = 5.0
"""Seconds that a link may take to send what is queued when it is closed."""


class SimulatedShell:
    """Carries actions out, and starts, kills and connects processes."""

    puts_off = True
    """Whether every other update waits for the next event, as if links were full at the commit."""

    def __init__(self, problem: ExactProblem, workers: int, expect: int | None = None) -> None:
        self.problem = problem
        self.now = 1000.0
        self.expect_workers = workers if expect is None else expect
        self.workers = [SimulatedWorker(problem, rank) for rank in range(workers)]
        self.wires: dict[int, tuple[Wire, SimulatedWorker]] = {}
        """What is open at the coordinator's end."""
        self.events: list[dict[str, Any]] = []
        self.saves: list[Save] = []
        self.finish: Finish | None = None
        self.coordinator: Coordinator | None = None
        self._closing: dict[int, float] = {}
        self._count = self._commits = 0
        self.start_coordinator()

    # The coordinator's process

    def start_coordinator(self) -> None:
        """Start from the last checkpoint, or from the beginning."""
        assert self.coordinator is None
        self.finish = None
        last = self.saves[-1] if self.saves else None
        self.coordinator = self.problem.coordinator(self.expect_workers, self.now, last)
        self.bystander = Bystander(self.coordinator)

    def kill_coordinator(self, delivered: int = 0) -> None:
        """Kill -9; up to `delivered` bytes still reach each worker."""
        for wire, worker in list(self.wires.values()):
            if worker.present and worker.wire is wire:
                self.deliver_down(worker, delivered)
            self._lose_wire(wire, worker)
        self.wires.clear()
        self._closing.clear()
        self.coordinator = None

    def run_until_idle(self) -> None:
        """Have a commit applied that was put off."""
        if self.coordinator and not self.finish:
            self._perform(self.coordinator.apply_update(self.now))

    def stop(self, reason: str = "stopped by SIGTERM") -> None:
        if self.coordinator and not self.finish:
            self._perform(self.coordinator.stop(reason, self.now))

    # Workers' processes

    def connect(self, worker: SimulatedWorker, certified: int | None = None) -> None:
        """Open a connection and send the request."""
        if self.coordinator is None or self.finish or worker.wire or not worker.present:
            return
        self._count += 1
        worker.wire = Wire(self._count, JOB.run_id)
        worker.session = Session(
            worker.request,
            self.problem.layout,
            self.problem.config.exchange.codec,
            self.problem.config.exchange.has_rounds,
        )
        worker.heard = worker.beat = self.now
        self.wires[self._count] = (worker.wire, worker)
        worker.wire.down.decoder.accept_tensors()
        worker.wire.up.send([worker.session.make_join_frame()])
        self._perform(self.coordinator.add_connection(self._count, certified, self.now))

    def kill(
        self, worker: SimulatedWorker, delivered: int | None = 0, silent: bool = False
    ) -> None:
        """Kill -9; up to `delivered` bytes (None: all) of what it sent still arrive.

        `silent` is a power cut: nobody closes the connection.
        """
        wire = worker.wire
        if wire and not worker.stalled:
            self.deliver_up(worker, delivered)
        worker.alive = worker.stalled = False
        worker.clear()
        if wire and wire.number in self.wires:
            wire.cut = True
            if not silent:
                self._disconnected(wire, "the connection was closed")

    def revive(self, worker: SimulatedWorker) -> None:
        """Start the process again."""
        assert worker.wire is None
        worker.clear()
        worker.alive, worker.stalled = True, False
        worker.ended = worker.refused = None

    def drop(self, worker: SimulatedWorker, delivered: int = 0) -> None:
        """Break the connection; the process lives."""
        if wire := worker.wire:
            self.deliver_up(worker, delivered)
            self._lose_wire(wire, worker)
            self._disconnected(wire, "the connection broke")

    # Bytes

    def deliver_up(self, worker: SimulatedWorker, count: int | None = None) -> None:
        """Bring up to `count` bytes to the coordinator."""
        wire = worker.wire
        if wire is None or wire.cut or wire.number not in self.wires:
            return
        data = wire.up.take(count)
        if data:
            self.machine.record_activity(wire.number, self.now)
        try:
            for frame in wire.up.received(data):
                self.bystander.saw(wire.number, frame)
                self._perform(self.machine.receive_frame(wire.number, frame, self.now))
                if self.machine.membership.find_member(wire.number):
                    wire.up.decoder.accept_tensors()
                if self.finish:
                    return
        except ProtocolError as error:
            self._lose_wire(wire, worker)
            self._disconnected(wire, str(error))

    def deliver_down(self, worker: SimulatedWorker, count: int | None = None) -> None:
        """Bring up to `count` bytes to a worker."""
        wire, session = worker.wire, worker.session
        if wire is None or session is None or wire.cut or worker.stalled:
            return
        data = wire.down.take(count)
        if data:
            worker.heard = self.now
            if self.coordinator and not self.finish:
                self.coordinator.record_activity(
                    wire.number, self.now
                )  # the peer made room for more
        for frame in wire.down.received(data):
            try:
                events, answers = session.receive_frame(frame)
            except RefusalError as refusal:
                if not refusal.retry:
                    worker.refused = str(refusal)
                self._lose_wire(wire, worker)
                self._disconnected(wire, "the worker closed it")
                return
            if answers:
                wire.up.send(answers)
            worker.events.extend((session, event) for event in events)
        if wire.closing and wire.down.empty:
            self._lose_wire(wire, worker)
            self._disconnected(wire, "closed")

    @property
    def machine(self) -> Coordinator:
        """The coordinator, which must be there."""
        assert self.coordinator
        return self.coordinator

    @property
    def end(self) -> Finish:
        """How the run ended, which it must have."""
        assert self.finish
        return self.finish

    @property
    def step(self) -> int:
        """Updates that the coordinator committed; it has yet to apply one that is put off."""
        training = self.machine.training
        return training.state.step + (not training.is_update_applied)

    def named(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [details for details in self.events if details["event"] == event]

    def record(self, event: dict[str, Any]) -> None:
        """Keep an event, and check it."""
        self.events.append(event)
        self.problem.check_event(event, self.step)

    # Inside

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=number, frames=frames, if_idle=if_idle):
                    self._send(number, frames, if_idle)
                case Close(link=number):
                    if number in self.wires:
                        self.wires[number][0].closing = True
                        self._closing[number] = self.now
                case ApplyUpdate():
                    self._commits += 1
                    if self._commits % 2 or not self.puts_off:
                        self.run_until_idle()
                case Save():
                    assert not self.saves or self.saves[-1].snapshot.step <= action.snapshot.step
                    self.saves.append(action)
                case Step():
                    self.record({"event": "step", **vars(action)})
                case Emit(event=event):
                    self.record(event)
                case Finish():
                    self._finish(action)

    def _send(self, number: int, frames: Iterable[Frame], if_idle: bool) -> None:
        if number not in self.wires:
            return
        wire, worker = self.wires[number]
        if if_idle and wire.down.queued:
            return
        wire.down.send(frames)
        if wire.down.full:
            self._lose_wire(wire, worker)
            self._disconnected(wire, "it reads too slowly")

    def _finish(self, finish: Finish) -> None:
        """Leave as the server does: what is queued goes out, then every connection closes."""
        assert self.finish is None
        self.finish = finish
        if finish.exit_code == 0:
            assert self.saves or self.step == 0, "it ended without a checkpoint"
            assert not self.saves or self.saves[-1].snapshot.step == self.step
        self.bystander.check(finish)
        for wire, worker in list(self.wires.values()):
            if worker.wire is wire:
                self.deliver_down(worker)
            self._lose_wire(wire, worker)
        self.wires.clear()
        self._closing.clear()
        for worker in self.workers:
            while worker.present and worker.step():
                pass

    def _lose_wire(self, wire: Wire, worker: SimulatedWorker) -> None:
        """End a connection at the worker's end."""
        wire.cut = True
        if worker.wire is wire:
            worker.wire = worker.session = None

    def _disconnected(self, wire: Wire, reason: str) -> None:
        """End a connection at the coordinator's end."""
        if self.wires.pop(wire.number, None) and self.coordinator and not self.finish:
            self._closing.pop(wire.number, None)
            self._perform(self.coordinator.remove_connection(wire.number, reason, self.now))
