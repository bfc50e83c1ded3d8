"""A coordinator and its workers in virtual time, with every byte between them under control.

The real Coordinator, Session, FrameEncoder and FrameDecoder; only sockets, clock, processes and
disk are played. What must hold at any time is checked in `check()` and on every event.
"""

from __future__ import annotations

from typing import Any

from exact_problem import JOB, ExactProblem
from simulated_worker import SimulatedWorker, Wire

from trainer.errors import ProtocolError
from trainer.exchange.actions import Action, Close, Emit, Finish, Save, Send, Settle
from trainer.exchange.coordinator import Coordinator
from trainer.exchange.messages import Heartbeat
from trainer.exchange.roster import RefusalError
from trainer.exchange.session import Session
from trainer.optimizer import TrainState

TICK = 0.125
FLUSH = 5.0
"""Seconds that a link may take to send what is queued when it is closed."""


class SimulatedCluster:
    """The shell around the state machine, and the processes and links around that."""

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
        self._count = 0
        self.start_coordinator()

    # The coordinator's process

    def start_coordinator(self) -> None:
        """Start from the last checkpoint, or from the beginning."""
        assert self.coordinator is None
        state, generation = self.problem.fresh_state(), 0
        if self.saves:
            snapshot, generation = self.saves[-1].snapshot, self.saves[-1].generation
            arrays = (snapshot.weights, snapshot.first_moment, snapshot.second_moment)
            state = TrainState(*(array.copy() for array in arrays), step=snapshot.step)
            assert state.weights.tobytes() == self.problem.trajectory[state.step]
        self.finish = None
        self.coordinator = Coordinator(
            config=self.problem.config,
            job=JOB,
            layout=self.problem.layout,
            plan=self.problem.plan,
            validation_samples=self.problem.validation_samples,
            state=state,
            expect_workers=self.expect_workers,
            score=lambda table: {"count": sum(map(sum, table))},
            now=self.now,
            generation=generation,
        )

    def kill_coordinator(self, delivered: int = 0) -> None:
        """Kill -9; up to `delivered` bytes still reach each worker."""
        for wire, worker in list(self.wires.values()):
            if worker.present and worker.wire is wire:
                self.deliver_down(worker, delivered)
            self._lose_wire(wire, worker)
        self.wires.clear()
        self._closing.clear()
        self.coordinator = None

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
            worker.request, self.problem.layout, self.problem.config.exchange.codec
        )
        worker.heard = worker.beat = self.now
        self.wires[self._count] = (worker.wire, worker)
        worker.wire.down.decoder.admit()
        worker.wire.up.send([worker.session.hello()])
        self._perform(self.coordinator.connected(self._count, certified, self.now))

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
        try:
            for frame in wire.up.received(wire.up.take(count)):
                assert self.coordinator is not None
                self._perform(self.coordinator.receive(wire.number, frame, self.now))
                if self.coordinator.roster.by_link(wire.number):
                    wire.up.decoder.admit()
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
        for frame in wire.down.received(wire.down.take(count)):
            worker.heard = self.now
            try:
                events, answers = session.receive(frame)
            except RefusalError as refusal:
                if not refusal.retry:
                    worker.refused = str(refusal)
                self._lose_wire(wire, worker)
                self._disconnected(wire, "the worker closed it")
                return
            wire.up.send(answers)
            worker.events.extend((session, event) for event in events)
        if wire.closing and wire.down.empty:
            self._lose_wire(wire, worker)
            self._disconnected(wire, "closed")

    def go_on(self, pieces: int = 1) -> None:
        """Let everyone who is there connect, talk and do so many small things each."""
        for _ in range(pieces):
            for worker in self.workers:
                self.connect(worker)
                self.deliver_up(worker)
                self.deliver_down(worker)
                if worker.present:
                    worker.step()
            self.check()

    def settle_down(self, rounds: int = 1000) -> None:
        """Let everyone who is there work and talk until nothing moves any more; no time passes."""
        for _ in range(rounds):
            moved = False
            for worker in self.workers:
                if not worker.present:
                    continue
                wire = worker.wire
                moved |= bool(wire and not wire.cut and not (wire.up.empty and wire.down.empty))
                self.deliver_up(worker)
                self.deliver_down(worker)
                moved |= worker.step()
            self.check()
            if not moved:
                return
        raise AssertionError("it never comes to rest")

    # Time

    def pass_time(self, seconds: float, flowing: bool = True) -> None:
        """Let time pass with everybody's timers; `flowing` delivers all bytes on the way."""
        end = self.now + seconds
        while self.now < end and self.coordinator and not self.finish:
            self.now += TICK
            for worker in self.workers:
                self._worker_timers(worker)
                if flowing and worker.present:
                    self.deliver_up(worker)
                    self.deliver_down(worker)
            for number, since in list(self._closing.items()):
                if self.now - since > FLUSH and number in self.wires:
                    wire, worker = self.wires[number]
                    self._lose_wire(wire, worker)
                    self._disconnected(wire, "closed")
            if not self.finish:
                self._perform(self.coordinator.tick(self.now))
            self.check()

    def start(self) -> None:
        """Let everyone connect and work until nothing moves without time."""
        for worker in self.workers:
            self.connect(worker)
        self.settle_down()

    def run_to_end(self, patience: float = 400.0) -> None:
        """Bring everyone back, let the network flow, and see the run through to its last step."""
        deadline = self.now + patience
        while True:
            if self.finish and self.finish.exit_code == 0 and self.complete:
                return
            assert self.now < deadline, "the run does not come to its end"
            if self.finish:
                self.coordinator = None
            if self.coordinator is None:
                self.start_coordinator()
            for worker in self.workers:
                worker.stalled = False
                if worker.gone and worker.wire is None:
                    self.revive(worker)
                self.connect(worker)
            self.settle_down()
            self.pass_time(TICK)

    @property
    def complete(self) -> bool:
        """Whether the last step was committed."""
        return bool(self.saves) and self.saves[-1].snapshot.step == self.problem.plan.total_steps

    @property
    def step(self) -> int:
        """Updates that the coordinator applied."""
        assert self.coordinator is not None
        return self.coordinator.training.state.step

    def named(self, event: str) -> list[dict[str, Any]]:
        """Return the events of a name."""
        return [details for details in self.events if details["event"] == event]

    # What must hold

    def check(self) -> None:
        """F-DP-001 and F-DP-002: who has applied k updates is at the k-th weights, bit for bit."""
        expected = self.problem.trajectory
        if self.coordinator:
            state = self.coordinator.training.state
            assert state.weights.tobytes() == expected[state.step]
        for worker in self.workers:
            if worker.state and not worker.corrupt:
                assert worker.state.weights.tobytes() == expected[worker.state.step]

    def _record(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.problem.check_event(event, self.step)

    # Inside

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=number, frames=frames):
                    if number in self.wires:
                        self.wires[number][0].down.send(frames)
                case Close(link=number):
                    if number in self.wires:
                        self.wires[number][0].closing = True
                        self._closing[number] = self.now
                case Settle():
                    assert self.coordinator is not None
                    self._perform(self.coordinator.settle(self.now))
                case Save():
                    assert not self.saves or self.saves[-1].snapshot.step <= action.snapshot.step
                    self.saves.append(action)
                case Emit(event=event):
                    self._record(event)
                case Finish():
                    self._finish(action)

    def _finish(self, finish: Finish) -> None:
        """Leave as the server does: what is queued goes out, then every connection closes."""
        assert self.finish is None
        self.finish = finish
        if finish.exit_code == 0:
            assert self.saves or self.step == 0, "it ended without a checkpoint"
            assert not self.saves or self.saves[-1].snapshot.step == self.step
        for wire, worker in list(self.wires.values()):
            if worker.wire is wire:
                self.deliver_down(worker)
            self._lose_wire(wire, worker)
        self.wires.clear()
        self._closing.clear()
        for worker in self.workers:
            while worker.present and worker.step():
                pass

    def _worker_timers(self, worker: SimulatedWorker) -> None:
        if not worker.present:
            return
        if worker.wire is None:
            self.connect(worker)
            return
        exchange = self.problem.config.exchange
        if self.now - worker.heard > 2 * exchange.lost_after:
            wire = worker.wire
            self._lose_wire(wire, worker)
            self._disconnected(wire, "the worker closed it")
        elif self.now - worker.beat >= exchange.heartbeat:
            worker.beat = self.now
            worker.send(Heartbeat())

    def _lose_wire(self, wire: Wire, worker: SimulatedWorker) -> None:
        """End a connection at the worker's end."""
        wire.cut = True
        if worker.wire is wire:
            worker.wire = worker.session = None

    def _disconnected(self, wire: Wire, reason: str) -> None:
        """End a connection at the coordinator's end."""
        if self.wires.pop(wire.number, None) and self.coordinator and not self.finish:
            self._closing.pop(wire.number, None)
            self._perform(self.coordinator.disconnected(wire.number, reason, self.now))
