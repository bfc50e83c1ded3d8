"""Sees what reaches the coordinator, and knows by itself whether the last state was proved."""

from __future__ import annotations

from trainer.exchange.coordinator.membership import Coordinator
from trainer.exchange.protocol.actions import Finish
from trainer.exchange.protocol.wire import Frame, MessageType
from trainer.optimizer.adamw import weights_digest


class Bystander:
    """Notes by link the newest state that each worker has proved to one coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._proved: dict[int, int] = {}
        self._reports: dict[int, tuple[int, bytes]] = {}

    def saw(self, link: int, frame: Frame) -> None:
        """Look at a frame before the coordinator gets it, which may have an update to apply."""
        if frame.type is MessageType.STATE_LOADED:
            self._proved[link] = frame.step
        elif frame.type is MessageType.WEIGHTS_REPORT:
            self._reports[link] = (frame.step + 1, bytes(frame.payload))

    def check(self, finish: Finish) -> None:
        """A run is only done when a worker proved its last state, and all that are there did."""
        if (finish.exit_code, finish.reason) == (0, "done"):
            state = self._coordinator.training.state
            digest = weights_digest(state.weights).encode()
            for link, (step, report) in self._reports.items():
                if step == state.step and digest in report:
                    self._proved[link] = step
            present = {self._proved.get(m.link) for m in self._coordinator.membership.list_ready()}
            assert present <= {state.step}, "someone who is there did not prove the last state"
            assert state.step in self._proved.values(), "no worker proved the last state"
