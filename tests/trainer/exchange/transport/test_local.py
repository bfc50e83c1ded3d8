"""A run of one worker without a network: stopped in the middle of a step, and with a dead disk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.trainer.exchange.serving import MemoryRecorder
from trainer.exchange.protocol.messages import ShardAssignment, Shutdown, WeightsReport
from trainer.exchange.transport.local import LocalExchange
from trainer.exchange.worker.session import (
    Admitted,
    Applied,
    Committed,
    Session,
    make_result_message,
)
from trainer.optimizer.adamw import AdamW, TrainState, weights_digest
from trainer.system.errors import StorageError


class Loop:
    """What a worker's loop does, an event at a time; `between` is called after each block."""

    def __init__(self, codec: str = "fp32", *, shared: bool = True, every: int = 100) -> None:
        self.problem = problem = ExactProblem(
            validation_samples=0, checkpoint__every=every, exchange__codec=codec
        )
        self.recorder = MemoryRecorder()
        self.coordinator = problem.coordinator(1, 0.0)
        state = self.coordinator.training.state if shared else None
        self.session = Session(join_request(0), problem.layout, codec, shared=state)
        self.exchange = LocalExchange(self.coordinator, self.session, self.recorder)
        self.weights: list[bytes] = []
        """The worker's after each update."""
        self._optimizer = AdamW(problem.config.optimizer, problem.layout)
        self._state: TrainState | None = None

    def run(self, between: Any) -> Shutdown:
        while True:
            event = self.exchange.next_event()
            if isinstance(event, Shutdown):
                return event
            if isinstance(event, Admitted):
                self._state = event.state
                assert (event.state is self.coordinator.training.state) == bool(self.session.shared)
            elif isinstance(event, ShardAssignment):
                self._train(event, between)
            elif isinstance(event, Committed | Applied):
                self._apply(event)

    def _train(self, shard: ShardAssignment, between: Any) -> None:
        problem = self.problem
        total = problem.shard_gradient(shard.epoch, shard.start, shard.stop)
        weight = problem.shard_weight(shard.start, shard.stop)
        for index in problem.layout.send_order:
            block = problem.layout.blocks[index]
            self.sent = total[block.start : block.stop]
            self.exchange.send_block(shard, index, self.sent, weight)
            between(shard.step, index)
        loss = problem.shard_loss(shard.epoch, shard.start, shard.stop)
        self.exchange.send(make_result_message(shard, loss, weight, weight, 0.1), shard.step)

    def _apply(self, event: Committed | Applied) -> None:
        assert self._state is not None
        commit = event.commit
        if isinstance(event, Committed):
            scalars = commit.learning_rate, commit.clip_scale
            self._optimizer.apply(self._state, event.gradient, *scalars)
        self.weights.append(self._state.weights.tobytes())
        if commit.report_weights:
            digest = weights_digest(self._state.weights)
            self.exchange.send(WeightsReport(step=commit.step, digest=digest), commit.step)


@pytest.fixture(params=[True, False], ids=["one state", "two states"])
def loop(request: pytest.FixtureRequest) -> Loop:
    return Loop(shared=request.param)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_one_state_has_the_bits_of_two(codec: str):
    """A checkpoint after each step keeps the arrays that it reads: the state moves to others."""
    one, two = (Loop(codec, shared=shared, every=1) for shared in (True, False))
    for loop in (one, two):
        assert loop.run(lambda *_: None).exit_code == 0
    assert one.weights == two.weights
    assert len(one.weights) == one.problem.plan.total_steps
    if codec != "int8":  # drops some of each gradient, which comes later
        assert one.weights == one.problem.trajectory[1:]
    saved = [(save.snapshot.step, save.snapshot.digest) for save in one.recorder.saved]
    assert saved == [(save.snapshot.step, save.snapshot.digest) for save in two.recorder.saved]
    assert len(saved) == len(one.weights)


def test_one_contribution_is_the_sum_and_the_average_where_it_is():
    loop = Loop()
    averaged: list[int] = []

    def between(_step: int, index: int) -> None:
        task = loop.coordinator.training.task
        assert task is not None
        assert task.sums is not None
        assert np.shares_memory(task.sums.averages[index].encoded, loop.sent)
        averaged.append(index)

    loop.run(between)
    assert len(averaged) == loop.problem.plan.total_steps * len(loop.problem.layout.blocks)


def test_a_run_to_its_end(loop: Loop):
    end = loop.run(lambda *_: None)
    assert (end.exit_code, end.reason) == (0, "done")
    assert [save.snapshot.step for save in loop.recorder.saved] == [6]


def test_a_stop_saves_the_last_commit_between_two_blocks(loop: Loop):
    saved: list[list[int]] = []

    def between(step: int, block: int) -> None:
        if step == 3:
            saved.append([save.snapshot.step for save in loop.recorder.saved])
            if block == loop.problem.layout.send_order[0]:
                loop.exchange.interrupt("stopped by SIGTERM")

    end = loop.run(between)
    assert (end.exit_code, end.reason) == (0, "stopped by SIGTERM")
    assert saved == [[], [3], [3], [3]], "before the step is over"
    assert [save.snapshot.step for save in loop.recorder.saved] == [3, 4]


def test_a_disk_that_takes_no_checkpoint_halts_it(loop: Loop):
    def between(step: int, block: int) -> None:
        if step == 3:
            loop.recorder.failure = StorageError("two in a row")

    end = loop.run(between)
    assert (end.exit_code, end.reason) == (6, "two in a row")
    assert loop.recorder.events[-1] == {"event": "halted", "reason": "two in a row"}
