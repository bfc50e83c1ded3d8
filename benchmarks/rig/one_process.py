"""A run of several workers in one process: a coordinator, sessions and loops without sockets.

They are a run's own, so what they compute has the bits of a run of as many processes with the same
shares (tests/cluster/test_one_process.py). The workers take turns with one replica: each writes its
weights there before it trains, or shares them with all others.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from trainer.data.metrics import class_scores
from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import Action, Finish, Send, Settle, Step
from trainer.exchange.protocol.messages import Message, ShardAssignment
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.worker.session import Event, Session
from trainer.model.initialization import initial_weights
from trainer.optimizer.adamw import TrainState, weights_digest
from trainer.replica.backend import ReplicaChoice
from trainer.replica.base import Replica
from trainer.run.composition.run import make_request, make_worker
from trainer.run.inputs import RunInputs

GRADIENTS = {
    MessageType.BLOCK_GRADIENT: "up",
    MessageType.NON_BLOCK_GRADIENT: "up",
    MessageType.AVERAGED_BLOCK_GRADIENT: "down",
    MessageType.AVERAGED_NON_BLOCK_GRADIENT: "down",
}


class OneProcess:
    """A run from its first step to its last.

    Args:
        inputs: `exchange.shares` must not be `measured`.
        on_step: called after each commit, with the replica holding the common weights.
    """

    def __init__(
        self,
        inputs: RunInputs,
        replica: Replica,
        workers: int,
        on_step: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes of gradients that went `up` and `down`, over all workers."""
        self.finish: Finish | None = None
        self.state = TrainState.fresh(
            initial_weights(inputs.layout, inputs.model_dir, inputs.config)
        )
        self._replica, self._on_step = replica, on_step
        self._outgoing: deque[tuple[int, Frame]] = deque()
        self._coordinator = Coordinator(
            config=inputs.config,
            job=inputs.job,
            layout=inputs.layout,
            plan=inputs.plan,
            validation_samples=len(inputs.validation or ()),
            state=self.state,
            expect_workers=workers,
            score=class_scores,
            now=time.monotonic(),
        )
        choice, exchange = ReplicaChoice(replica, "cpu", ""), inputs.config.exchange
        self._seats: dict[int, _Seat] = {}
        for rank in range(workers):
            request = make_request(inputs, choice, rank)
            rounds = exchange.has_rounds
            session = Session(request, inputs.layout, exchange.codec, rounds)
            self._seats[rank] = _Seat(self._take, rank, session)
        self._workers = [
            make_worker(inputs, choice, lambda seat=seat: seat) for seat in self._seats.values()
        ]

    def run(self) -> str:
        """Run to the end and return the digest of the weights."""
        for link, seat in self._seats.items():
            self._perform(self._coordinator.connected(link, None, time.monotonic()))
            self._take(link, [seat.session.hello()])
        while self.finish is None:
            for worker in self._workers:
                try:
                    worker.run()
                except _NothingToDo:
                    continue
        assert self.finish.exit_code == 0, self.finish
        return weights_digest(self.state.weights)

    def _take(self, link: int, frames: Iterable[Frame]) -> None:
        """Hand a worker's frames to the coordinator, and all that answers them."""
        self._outgoing.extend((link, frame) for frame in frames)
        while self._outgoing:
            link, frame = self._outgoing.popleft()
            if frame.type in GRADIENTS:
                self.sent["up"] += len(frame.payload)
            self._perform(self._coordinator.receive(link, frame, time.monotonic()))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(link=link, frames=frames):
                    for frame in frames:
                        if frame.type in GRADIENTS:
                            self.sent["down"] += len(frame.payload)
                        answers = self._seats[link].deliver(frame)
                        self._outgoing.extend((link, answer) for answer in answers)
                case Settle():
                    self._perform(self._coordinator.settle(time.monotonic()))
                case Step():
                    self._replica.write_trainable(self.state.weights)
                    self._on_step(action)
                case Finish():
                    self.finish = action
                case _:
                    pass


class _NothingToDo(Exception):  # noqa: N818  # no error: it is another one's turn
    pass


class _Seat:
    """The Exchange of one worker."""

    def __init__(
        self, take: Callable[[int, Iterable[Frame]], None], link: int, session: Session
    ) -> None:
        self.session = session
        self._take, self._link = take, link
        self._events: deque[Event] = deque()

    def deliver(self, frame: Frame) -> list[Frame]:
        """Take a frame of the coordinator in; return what answers it."""
        events, answers = self.session.receive(frame)
        self._events.extend(events)
        return answers

    def next_event(self) -> Event | None:
        """Return the next event, or leave the worker's loop until there is one."""
        if not self._events:
            raise _NothingToDo
        return self._events.popleft()

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: NDArray[np.float32], weight: int
    ) -> None:
        """Hand a block's gradient sum over."""
        self._take(self._link, self.session.block(shard, index, gradient, weight))

    def send(self, message: Message, step: int) -> None:
        """Hand a result or a report over."""
        self._take(self._link, self.session.answer(message, step))

    def interrupt(self, reason: str) -> None:
        """Nothing here is stopped."""

    def close(self, reason: str) -> None:
        """Nothing is held."""
