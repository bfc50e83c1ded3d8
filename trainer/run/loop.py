"""The loop of a worker: one event after another, each a method of `Worker`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from trainer.data.encoder import IGNORED
from trainer.data.order import permute_epoch
from trainer.data.tokens import Encoded
from trainer.exchange.protocol.messages import (
    GenerationRequest,
    PartialShard,
    ShardAssignment,
    Shutdown,
    StepCommit,
    WeightsReport,
)
from trainer.exchange.protocol.schedule import StepPlan
from trainer.exchange.worker.base import Exchange
from trainer.exchange.worker.session import Admitted, Applied, Committed, Event, make_result_message
from trainer.optimizer.adamw import TrainState, weights_digest
from trainer.optimizer.nesterov import Update
from trainer.replica.base import Replica
from trainer.run.inner_steps import InnerSteps

log = logging.getLogger(__name__)


def compute_loss_weight(
    batch: Sequence[Encoded], class_weights: Sequence[int] | None = None
) -> int:
    """Return what a mean over the batch divides by: samples by class, pairs, or target tokens."""
    if batch and batch[0].rejected is not None:
        return len(batch)
    return sum(
        (class_weights[sample.labels] if class_weights else 1)
        if isinstance(sample.labels, int)
        else int(np.count_nonzero(sample.labels != IGNORED))
        for sample in batch
    )


class Samples(Protocol):
    """The training or validation samples of a replica, in an order that all workers know."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Encoded: ...


@dataclass
class Worker:
    """The training loop of one replica; `stop_reason` ends it after the current step."""

    replica: Replica
    exchange: Exchange
    optimizer: Update
    plan: StepPlan
    train: Samples
    validation: Samples | None
    seed: int
    order: Callable[[int, int, int], np.ndarray] = permute_epoch
    """(seed, epoch, length) -> the permutation of `range(length)` that an epoch visits."""
    alpha: Callable[[int], float] | None = None
    """The divergence's share at an inner step, counted from 1, of a distillation."""
    weigh: Callable[[Sequence[Any]], int] = compute_loss_weight
    """Returns what a mean over a shard divides by; called when its gradient begins to leave."""
    watts: Callable[[], float | None] = lambda: None
    """The host's power, if a budget needs it and something measures it."""
    rounds: Callable[[StepPlan, TrainState], InnerSteps] | None = None
    """Function that makes the inner steps after the state before an outer step."""
    stop_reason: str = ""
    _state: TrainState | None = None
    _inner: InnerSteps | None = None
    _commit_pending: bool = False
    _orders: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    def run(self) -> Shutdown:
        """Work until the run is over, or until asked to stop, and return how it ended."""
        while True:
            # No variable keeps the event: a gradient that was applied would stay for a whole step.
            if end := self._handle_event(self.exchange.next_event()):
                return end
            if self.stop_reason and not self._commit_pending:
                self.exchange.close(self.stop_reason)
                return Shutdown(reason=self.stop_reason, exit_code=0)

    def _handle_event(self, event: Event | None) -> Shutdown | None:
        """Do what an event asks for; return it if it is the end."""
        match event:
            case Admitted(rank=rank, state=state):
                log.info("joined as rank %d at step %d", rank, state.step)
                self._state, self._commit_pending = state, False
                self._inner = None
                self._begin_rounds_if_due()
                self.replica.write_trainable(state.weights)
            case ShardAssignment(kind="train") as shard if self._inner:
                self._train_inner_steps(shard, self._inner)
            case ShardAssignment(kind="train") as shard:
                self._train_shard(shard)
            case ShardAssignment(generation_request=GenerationRequest() as asked) as shard:
                self._generate_answers(shard, asked)
            case ShardAssignment() as shard:
                self._evaluate_shard(shard)
            case Committed(commit=commit, gradient=gradient):
                self._apply_gradient(commit, gradient)
            case Applied(commit=commit):
                self._after_commit(commit)
            case Shutdown() as end:
                return end
            case None:
                pass
        return None

    def interrupt(self, reason: str) -> None:
        """Stop after the step that is under way; safe in a signal handler."""
        self.stop_reason = reason
        self.exchange.interrupt(reason)

    def _train_shard(self, shard: ShardAssignment) -> None:
        """Forward and backward over a shard; blocks are sent while backward continues."""
        batch = self._read_samples(shard)
        weight: int | None = None
        wanted = None if shard.missing_blocks is None else set(shard.missing_blocks)
        first: float | None = None

        def on_block(index: int, gradient: np.ndarray) -> None:
            nonlocal first, weight
            weight = self.weigh(batch) if weight is None else weight
            if wanted is None or index in wanted:
                first = time.perf_counter() if first is None else first
                self.exchange.send_block(shard, index, gradient, weight)

        self._commit_pending = True
        result = self.replica.forward_backward(batch, on_block, self._distillation_alpha(shard))
        overlap = 0.0 if first is None else time.perf_counter() - first
        assert weight in (None, result.weight), (result.weight, weight)
        self.exchange.send(
            make_result_message(
                shard,
                result.loss_sum,
                result.weight,
                result.tokens,
                result.seconds,
                overlap,
                watts=self.watts(),
            ),
            shard.step,
        )

    def _train_inner_steps(self, shard: ShardAssignment, inner: InnerSteps) -> None:
        """Take a shard of a round: inner steps, then how far they moved the weights is sent."""
        batch = self._read_samples(shard)
        self._commit_pending = True
        alpha = self._distillation_alpha(shard)
        moved = inner.train_shard(
            batch, shard.step, shard.inner_batch_size, alpha=alpha, limit=shard.time_limit
        )
        result = moved.result
        if moved.samples < len(batch):
            self.exchange.send(PartialShard(shard=shard.shard, samples=moved.samples), shard.step)
        blocks = (
            inner.order_blocks(shard.step) if shard.missing_blocks is None else shard.missing_blocks
        )
        for index in blocks:
            self.exchange.send_block(shard, index, moved.block(index), result.weight)
        measured = (result.loss_sum, result.weight, result.tokens, result.seconds)
        self.exchange.send(make_result_message(shard, *measured, watts=self.watts()), shard.step)

    def _apply_gradient(self, commit: StepCommit, gradient: np.ndarray) -> None:
        """Apply the averaged gradient: the same bytes and the same scalars as all members."""
        assert self._state is not None
        scalars, first_round = (commit.learning_rate, commit.clip_scale), self.plan.first_outer_step
        self.optimizer.apply(self._state, gradient, *scalars, first_round)
        self._after_commit(commit)

    def _after_commit(self, commit: StepCommit) -> None:
        """Compute with the state after a commit from here on, and prove it when that is due."""
        assert self._state is not None
        if self._inner:
            self._inner.on_outer_update(commit.step)
        else:
            self._begin_rounds_if_due()
        self.replica.write_trainable(self._state.weights)
        self._commit_pending = False
        if commit.report_weights:
            digest = weights_digest(self._state.weights)
            self.exchange.send(WeightsReport(step=commit.step, digest=digest), commit.step)

    def _begin_rounds_if_due(self) -> None:
        assert self._state is not None
        if self.plan.is_outer_step(self._state.step):
            assert self.rounds is not None
            self._inner = self.rounds(self.plan, self._state)

    def _distillation_alpha(self, shard: ShardAssignment) -> float | None:
        return self.alpha(self.plan.find_inner_steps(shard.step).stop) if self.alpha else None

    def _evaluate_shard(self, shard: ShardAssignment) -> None:
        assert self.validation is not None
        batch = [self.validation[index] for index in range(shard.start, shard.stop)]
        began = time.perf_counter()
        result = self.replica.evaluate(batch)
        seconds = time.perf_counter() - began
        tokens = sum(getattr(sample, "tokens", 1) for sample in batch)  # a script's are indices
        self.exchange.send(
            make_result_message(
                shard,
                result.loss_sum,
                result.weight,
                tokens,
                seconds,
                confusion=result.confusion,
                figures=result.figures,
            ),
            shard.step,
        )

    def _generate_answers(self, shard: ShardAssignment, asked: GenerationRequest) -> None:
        began = time.perf_counter()
        answers = self.replica.answer(
            asked.prompts, asked.max_new_tokens, frozenset(asked.stop_tokens)
        )
        seconds, new = time.perf_counter() - began, sum(map(len, answers))
        message = make_result_message(shard, 0.0, 0, new, seconds, answers=answers)
        self.exchange.send(message, shard.step)

    def _read_samples(self, shard: ShardAssignment) -> list[Encoded]:
        if shard.epoch not in self._orders:
            self._orders = {shard.epoch: self.order(self.seed, shard.epoch, len(self.train))}
        order = self._orders[shard.epoch]
        return [self.train[int(index)] for index in order[shard.start : shard.stop]]
