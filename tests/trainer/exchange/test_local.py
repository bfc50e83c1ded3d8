"""A run of one worker without a network: stopped in the middle of a step, and with a dead disk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.trainer.exchange.serving import RememberingKeeper
from trainer.exchange.protocol.messages import ShardAssignment, Shutdown, WeightsReport
from trainer.exchange.transport.local import LocalExchange
from trainer.exchange.worker.session import Admitted, Committed, Session, result_message
from trainer.optimizer.adamw import AdamW, TrainState, weights_digest
from trainer.system.errors import StorageError


class Loop:
    """What a worker's loop does, an event at a time; `between` is called after each block."""

    def __init__(self) -> None:
        self.problem = problem = ExactProblem(validation_samples=0, checkpoint__every=100)
        self.keeper = RememberingKeeper()
        session = Session(join_request(0), problem.layout, "fp32")
        self.exchange = LocalExchange(problem.coordinator(1, 0.0), session, self.keeper)
        self._optimizer = AdamW(problem.config.optimizer, problem.layout)
        self._state: TrainState | None = None

    def run(self, between: Any) -> Shutdown:
        while True:
            event = self.exchange.next_event()
            if isinstance(event, Shutdown):
                return event
            if isinstance(event, Admitted):
                self._state = event.state
            elif isinstance(event, ShardAssignment):
                self._train(event, between)
            elif isinstance(event, Committed):
                self._apply(event)

    def _train(self, shard: ShardAssignment, between: Any) -> None:
        problem = self.problem
        total = problem.shard_gradient(shard.epoch, shard.start, shard.stop)
        weight = problem.shard_weight(shard.start, shard.stop)
        for index in problem.layout.send_order:
            block = problem.layout.blocks[index]
            self.exchange.send_block(shard, index, total[block.start : block.stop], weight)
            between(shard.step, index)
        loss = problem.shard_loss(shard.epoch, shard.start, shard.stop)
        self.exchange.send(result_message(shard, loss, weight, weight, 0.1), shard.step)

    def _apply(self, event: Committed) -> None:
        assert self._state is not None
        commit = event.commit
        self._optimizer.apply(self._state, event.gradient, commit.learning_rate, commit.clip_scale)
        if commit.report:
            digest = weights_digest(self._state.weights)
            self.exchange.send(WeightsReport(step=commit.step, digest=digest), commit.step)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_run_to_its_end(loop: Loop):
    end = loop.run(lambda *_: None)
    assert (end.exit_code, end.reason) == (0, "done")
    assert [save.snapshot.step for save in loop.keeper.saved] == [6]


def test_a_stop_saves_the_last_commit_between_two_blocks(loop: Loop):
    saved: list[list[int]] = []

    def between(step: int, block: int) -> None:
        if step == 3:
            saved.append([save.snapshot.step for save in loop.keeper.saved])
            if block == loop.problem.layout.send_order[0]:
                loop.exchange.interrupt("stopped by SIGTERM")

    end = loop.run(between)
    assert (end.exit_code, end.reason) == (0, "stopped by SIGTERM")
    assert saved == [[], [3], [3], [3]], "before the step is over"
    assert [save.snapshot.step for save in loop.keeper.saved] == [3, 4]


def test_a_disk_that_takes_no_checkpoint_halts_it(loop: Loop):
    def between(step: int, block: int) -> None:
        if step == 3:
            loop.keeper.failure = StorageError("two in a row")

    end = loop.run(between)
    assert (end.exit_code, end.reason) == (6, "two in a row")
    assert loop.keeper.events[-1] == {"event": "halted", "reason": "two in a row"}
