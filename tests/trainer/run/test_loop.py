"""The worker's loop: what it tells of a shard beside the gradients."""

from __future__ import annotations

import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.trainer.clock import Clock
from tests.trainer.exchange.exact_problem import tiny_layout
from trainer.config.run import OptimizerConfig, load_config
from trainer.data.tokens import Encoded
from trainer.exchange.protocol.messages import (
    PartialShard,
    ShardAssignment,
    ShardResult,
    Shutdown,
    StepCommit,
)
from trainer.exchange.protocol.schedule import StepPlan
from trainer.exchange.worker.session import Admitted, Committed
from trainer.optimizer.adamw import TrainState
from trainer.optimizer.nesterov import Update
from trainer.replica.base import OnBlock, StepResult
from trainer.run import loop
from trainer.run.inner_steps import InnerSteps
from trainer.run.loop import Worker

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
    exchange = OneShard(SHARD.model_copy(update={"missing_blocks": blocks}))
    sample = Encoded(np.arange(3, dtype=np.int32), 1)
    nothing: Any = None
    worker = Worker(
        TimedReplica(clock),  # pyright: ignore[reportArgumentType]
        exchange,  # pyright: ignore[reportArgumentType]
        nothing,
        StepPlan(2, 2, 1),
        [sample, sample],  # pyright: ignore[reportArgumentType]
        None,
        seed=0,
    )
    worker.run()
    (result,) = exchange.sent
    assert isinstance(result, ShardResult)
    assert (result.compute_seconds, result.overlap_seconds) == (4.0, overlap)


@pytest.mark.parametrize(("limit", "taken"), [(None, 8), (0.0, 4)])
def test_a_round_is_sent_at_its_end_and_handed_in_early_at_its_limit(
    limit: float | None, taken: int
):
    """The message comes before the blocks: these are about the first samples alone."""
    clock = Clock()
    sample = Encoded(np.arange(3, dtype=np.int32), 1)
    changes = {"step": 0, "stop": 8, "inner_batch_size": 4, "time_limit": limit}
    shard = SHARD.model_copy(update=changes)
    state = TrainState.create(np.ones(tiny_layout().size, np.float32))
    exchange = OneShard(shard)
    exchange.sent = exchange.blocks = order = []  # both in one order
    exchange._events.insert(0, Admitted(0, state))
    replica: Any = TimedReplica(clock)
    replica.write_trainable = lambda flat: None
    worker = Worker(
        replica,
        exchange,  # pyright: ignore[reportArgumentType]
        Update(load_config("quickstart"), tiny_layout()),
        StepPlan(8, 4, 1, None, 2),
        [sample] * 8,  # pyright: ignore[reportArgumentType]
        None,
        seed=0,
        rounds=partial(InnerSteps, replica, OptimizerConfig()),
    )
    worker.run()
    early = [PartialShard(shard=4, samples=4)] if limit is not None else []
    assert order[: len(early)] == early
    # The only round is the last, and so a flush: as many blocks again.
    assert order[len(early) : -1] == [1, 0, 3, 2, 5, 4, 7, 6]
    assert (order[-1].weight, order[-1].shard) == (taken, 4)


def test_a_gradient_is_gone_once_it_was_applied() -> None:
    """During the next forward and backward its memory is of more use to the replica."""
    layout = tiny_layout()
    gradient = np.ones(layout.size, np.float32)
    seen = weakref.ref(gradient)
    commit = StepCommit(
        step=0,
        loss=1.0,
        grad_norm=1.0,
        clip_scale=1.0,
        learning_rate=0.1,
        report_weights=False,
        residuals_flushed=True,
        next_assignment=None,
    )
    state = TrainState.create(np.ones(layout.size, np.float32))
    exchange = OneShard(SHARD.model_copy(update={"step": 1}))
    exchange._events[:0] = [Admitted(0, state), Committed(commit, gradient)]
    del gradient
    left: list[np.ndarray | None] = []
    replica: Any = TimedReplica(Clock())
    replica.write_trainable = lambda _flat: None
    compute = replica.forward_backward
    replica.forward_backward = lambda *of: (left.append(seen()), compute(*of))[1]
    sample = Encoded(np.arange(3, dtype=np.int32), 1)
    worker = Worker(
        replica,
        exchange,  # pyright: ignore[reportArgumentType]
        Update(load_config("quickstart"), layout),
        StepPlan(4, 2, 1),
        [sample] * 4,  # pyright: ignore[reportArgumentType]
        None,
        seed=0,
    )
    worker.run()
    assert (state.step, left) == (1, [None])
