"""A host whose workers meet: one carries the gradients of the others, with the real Carrier.

Links between them are bytes too. What lies in shared memory is overwritten once its worker has seen
the commit, so a sum that is read too late is a wrong one here as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.trainer.exchange.exact_problem import JOB
from tests.trainer.exchange.simulated_worker import Float32, Pipe, SimulatedWorker
from trainer.exchange.protocol import messages
from trainer.exchange.protocol.messages import CarriedBy, CarryAccepted, CarryRequest
from trainer.exchange.protocol.wire import Frame
from trainer.exchange.worker.carrier import Carrier
from trainer.exchange.worker.session import Committed, Event, Session
from trainer.system.errors import ProtocolError


class LocalWire:
    """A link between a worker and its carrier; each end learns late that the other is gone."""

    def __init__(self, number: int, worker: SimulatedWorker) -> None:
        self.number = number
        self.worker = worker
        self.session = worker.session
        self.up, self.down = Pipe(JOB.run_id), Pipe(JOB.run_id)
        self.up.decoder.admit()
        self.carrier_rank: int | None = None
        self.left = self.ended = False
        """Whether the worker, or the carrier, has closed its end."""
        self.committed = -1
        """The newest commit that the worker has seen: all memory of that step may change."""


class SimulatedHost:
    """Who carries, and the links to it."""

    def __init__(self) -> None:
        self.holder: SimulatedWorker | None = None
        """Who has taken the name at which a carrier is found."""
        self.carrier: Carrier | None = None
        self._at_carrier: dict[int, LocalWire] = {}
        self._at_worker: dict[int, LocalWire] = {}
        self._count = 0

    def talk(self, worker: SimulatedWorker, count: int | None = None) -> bool:
        """Let a worker look for a carrier, and bytes pass on its link; return if any did."""
        if worker.host is not self:
            return False
        if worker.present and worker.session and worker.session.accepted:
            self._look(worker)
        moved = False
        for wire in [w for w in self._at_carrier.values() if w.worker is worker]:
            moved |= self._upwards(wire, count)
        if wire := self._at_worker.get(id(worker)):
            moved |= self._downwards(wire, count)
        return moved

    def link_of(self, worker: SimulatedWorker) -> LocalWire:
        """Return a worker's link to its carrier."""
        return self._at_worker[id(worker)]

    def cut(self, worker: SimulatedWorker) -> None:
        """Break a worker's link to its carrier, as each end sees for itself."""
        if wire := self._at_worker.get(id(worker)):
            wire.left = wire.ended = True

    def leave(self, worker: SimulatedWorker) -> None:
        """End all that a worker holds here: its process or its membership is over."""
        if worker is self.holder:
            for wire in self._at_carrier.values():
                wire.ended = True
            self._at_carrier.clear()
            self.holder = self.carrier = None
        if wire := self._at_worker.pop(id(worker), None):
            wire.left = True

    def follow(self, worker: SimulatedWorker, event: Event) -> Iterator[Frame]:
        """Let whoever carries, or is carried, know of an event of its membership."""
        if isinstance(event, Committed):
            for wire in self._at_carrier.values():
                if wire.worker is worker and wire.session is worker.session:
                    wire.committed = event.commit.step
                    self._overwrite(wire)
        if worker is self.holder and self.carrier:
            return self.carrier.follow(event)
        return iter(())

    def hand_over(
        self,
        worker: SimulatedWorker,
        session: Session,
        shard: messages.ShardAssignment,
        index: int,
        gradient: Float32,
        weight: int,
    ) -> None:
        """Take a block of a worker whose group sends one gradient."""
        if session is not worker.session:
            return
        if shard.carries:
            if worker is self.holder and self.carrier and worker.wire:
                worker.wire.up.send(self.carrier.add(shard, index, gradient, weight))
        elif (wire := self._at_worker.get(id(worker))) and wire.carrier_rank == shard.carrier:
            wire.up.send(session.block(shard, index, gradient, weight))

    # Inside

    def _look(self, worker: SimulatedWorker) -> None:
        assert worker.session
        if worker is self.holder or id(worker) in self._at_worker:
            return
        if self.holder is None:
            self.holder = worker
            self.carrier = Carrier(worker.session, worker.problem.layout)
        elif self.holder.present:
            self._count += 1
            wire = LocalWire(self._count, worker)
            self._at_carrier[self._count] = self._at_worker[id(worker)] = wire
            session = worker.session
            asked = CarryRequest(rank=session.rank, generation=session.generation)
            wire.up.send([session.message(asked)])

    def _upwards(self, wire: LocalWire, count: int | None) -> bool:
        """Bring bytes to the carrier."""
        holder, carrier = self.holder, self.carrier
        if not (holder and carrier and holder.present and holder.wire):
            return False
        data = wire.up.take(count)
        try:
            for frame in wire.up.received(data):
                seen = frame
                if frame.weight and frame.step <= wire.committed:
                    seen = replace(frame, payload=b"\x55" * len(frame.payload))
                answers, upwards = carrier.receive(wire.number, seen)
                wire.down.send(answers)
                holder.wire.up.send(upwards)
        except ProtocolError:
            wire.ended = True
        if wire.ended or (wire.left and wire.up.empty):
            carrier.gone(wire.number)
            self._at_carrier.pop(wire.number, None)
            wire.ended = True
        return bool(data)

    def _downwards(self, wire: LocalWire, count: int | None) -> bool:
        """Bring bytes to the worker that is carried."""
        worker = wire.worker
        if not worker.present or worker.session is None:
            return False
        data = wire.down.take(count)
        for frame in wire.down.received(data):
            accepted = messages.parse(frame)
            assert isinstance(accepted, CarryAccepted)
            wire.carrier_rank = accepted.rank
            worker.send(CarriedBy(rank=accepted.rank, generation=accepted.generation))
        if wire.left or (wire.ended and wire.down.empty):
            del self._at_worker[id(worker)]
            wire.left = True
            if wire.carrier_rank is not None:
                worker.send(CarriedBy(rank=None))
            return True
        return bool(data)

    def _overwrite(self, wire: LocalWire) -> None:
        """Let a worker write over what its carrier still holds of steps that are over."""
        if self.carrier is None:
            return
        peer = self.carrier._peers.get(wire.number)
        if peer is None:
            return
        for key, part in list(peer.sums.items()):
            if part.step <= wire.committed:
                peer.sums[key] = replace(part, values=np.full_like(part.values, 777.0))
