"""A run of one worker without a network: the same state machine, called directly."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

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
from trainer.exchange.protocol.messages import Message, ShardAssignment
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.exchange.transport.recorder import Recorder
from trainer.exchange.worker.session import Event, Session
from trainer.system.errors import BudgetStopError

_LINK = 1


class LocalExchange:
    """The Exchange of `--role local`; it has no clock, so no member can be late."""

    def __init__(self, coordinator: Coordinator, session: Session, recorder: Recorder) -> None:
        self._coordinator = coordinator
        self._session = session
        self._recorder = recorder
        self._events: deque[Event] = deque()
        self._outgoing: deque[Frame] = deque([session.make_join_frame()])
        self._stop_reason: str | None = None
        self._lent: dict[int, NDArray[np.float32]] = {}
        if session.shared:
            coordinator.training.memory.lend = lambda block: self._lent.pop(block, None)
        self.finish: Finish | None = None
        """How the run ended."""
        self._perform_actions(coordinator.add_connection(_LINK, None, time.monotonic()))

    def next_event(self) -> Event | None:
        """Return the next event; the machine always has one until the run is over."""
        self._deliver_frames()
        self._poll()
        return self._events.popleft() if self._events else None

    def send_block(
        self, shard: ShardAssignment, index: int, gradient: NDArray[np.float32], weight: int
    ) -> None:
        """Hand a block's gradient sum to the coordinator.

        Beside a shared state a sum in fp32, the only one of the step, becomes the average in place.
        """
        self._lent[index] = gradient
        self._outgoing.extend(self._session.make_block_frames(shard, index, gradient, weight))
        self._deliver_frames()
        self._lent.clear()
        self._poll()  # what is committed is saved without waiting for the rest of the step

    def send(self, message: Message, step: int) -> None:
        """Hand a result or a report to the coordinator."""
        self._outgoing.extend(self._session.make_answer_frames(message, step))
        self._deliver_frames()

    def interrupt(self, reason: str) -> None:
        """Request a checkpoint of what is committed, and an end after the current step."""
        self._stop_reason = reason

    def close(self, reason: str) -> None:
        """Do nothing: no resource is open."""

    def _poll(self) -> None:
        """Stop when asked to, or for the budget, and halt when nothing can be saved."""
        if self._stop_reason is not None:
            reason, self._stop_reason = self._stop_reason, None
            self._perform_actions(self._coordinator.stop(reason, time.monotonic()))
        if ending := self._recorder.ending:
            now, code = time.monotonic(), BudgetStopError.exit_code
            self._perform_actions(self._coordinator.stop(ending, now, code))
        if failure := self._recorder.failure:
            self._perform_actions(self._coordinator.halt(failure))
        self._deliver_frames()

    def _deliver_frames(self) -> None:
        while self._outgoing:
            frame = self._outgoing.popleft()
            self._perform_actions(self._coordinator.receive_frame(_LINK, frame, time.monotonic()))

    def _perform_actions(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(frames=frames):
                    for frame in frames:
                        if self._session.shared and frame.type is MessageType.AVERAGED_GRADIENT:
                            break  # the coordinator applies it to the state of both
                        events, answers = self._session.receive_frame(frame)
                        self._events.extend(events)
                        self._outgoing.extend(answers)
                case ApplyUpdate():
                    self._perform_actions(self._coordinator.apply_update(time.monotonic()))
                case Save():
                    self._recorder.save(action)
                case Step():
                    self._recorder.log_step(action)
                case Emit(event=event):
                    self._recorder.emit(event)
                case Finish():
                    self.finish = action
                case Close():
                    pass
