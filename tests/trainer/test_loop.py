"""The worker's loop: what it tells of a shard beside the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.trainer.clock import Clock
from tests.trainer.exchange.exact_problem import tiny_layout
from trainer import loop
from trainer.data.tokens import Encoded
from trainer.exchange.protocol.messages import ShardAssignment, ShardResult, Shutdown
from trainer.loop import Worker
from trainer.replica.base import OnBlock, StepResult

SHARD = ShardAssignment(kind="train", shard=4, step=2, epoch=0, start=0, stop=2)


class TimedReplica:
    """Needs a second for forward, and one for each block of backward but the first."""

    def __init__(self, clock: Clock) -> None:
        self.layout = tiny_layout()
        self._clock = clock

    def forward_backward(self, batch: Any, on_block: OnBlock, alpha: Any = None) -> StepResult:
        began = self._clock.now
        for index in self.layout.send_order:
            self._clock.now += 1.0
            on_block(index, np.zeros(self.layout.blocks[index].size, np.float32))
        return StepResult(1.0, len(batch), 6, self._clock.now - began)


class OneShard:
    """An exchange that deals one shard and keeps its result."""

    def __init__(self, shard: ShardAssignment) -> None:
        self._events: list[Any] = [shard, Shutdown(reason="done", exit_code=0)]
        self.blocks: list[int] = []
        self.sent: list[Any] = []

    def next_event(self) -> Any:
        return self._events.pop(0)

    def send_block(self, shard: Any, index: int, gradient: Any, weight: int) -> None:
        self.blocks.append(index)

    def send(self, message: Any, step: int) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("blocks", "overlap"), [(None, 3.0), ((0, 2), 2.0), ((2,), 0.0), ((), 0.0)]
)
def test_a_result_says_how_much_followed_the_first_gradient(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, ...] | None, overlap: float
):
    """Backward ends a second for each block later; only a block that is wanted is handed over."""
    clock = Clock()
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    exchange = OneShard(SHARD.model_copy(update={"blocks": blocks}))
    sample = Encoded(np.arange(3, dtype=np.int32), 1)
    nothing: Any = None
    worker = Worker(TimedReplica(clock), exchange, nothing, [sample, sample], None, seed=0)  # pyright: ignore[reportArgumentType]
    worker.run()
    (result,) = exchange.sent
    assert isinstance(result, ShardResult)
    assert (result.seconds, result.overlap) == (4.0, overlap)
