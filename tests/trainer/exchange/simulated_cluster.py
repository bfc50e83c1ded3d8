"""A coordinator and its workers in virtual time, with every byte between them under control.

The real Coordinator, Session, FrameEncoder and FrameDecoder; only sockets, clock, processes and
disk are played. What must hold at any time is checked in `check()` and on every event.
"""

from __future__ import annotations

from tests.trainer.exchange.simulated_shell import FLUSH, SimulatedShell
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from trainer.exchange.protocol.messages import Heartbeat
from trainer.optimizer.adamw import TrainState

TICK = 0.125


class SimulatedCluster(SimulatedShell):
    """The processes and links of the shell, moved through time."""

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
                before = len(self.events)
                self.run_until_idle()
                if len(self.events) == before:
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
                self.tick()
            self.check()

    def tick(self) -> None:
        """Let the coordinator's timer run out now."""
        self._perform(self.machine.tick(self.now))

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

    # What must hold

    def check(self) -> None:
        """F-DP-001 and F-DP-002: who has applied k updates is at the k-th weights, bit for bit."""
        expected = self.problem.trajectory
        if self.coordinator:
            state = self.coordinator.training.state
            assert state.weights.tobytes() == expected[state.step]
            self._check_settled(state)
        for worker in self.workers:
            if worker.state and not worker.corrupt:
                assert worker.state.weights.tobytes() == expected[worker.state.step]
                self._check_settled(worker.state)

    def _check_settled(self, state: TrainState) -> None:
        if self.problem.config.exchange.has_rounds:
            assert state.second_moment.tobytes() == self.problem.second_moments[state.step]

    # Inside

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
            if worker.wire.up.queued == 0:
                worker.send(Heartbeat())
