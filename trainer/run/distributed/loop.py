"""The loop of a rank: one step reads from top to bottom in `DistributedRun.run`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from trainer.config.run import RunConfig
from trainer.data.metrics import mean_loss
from trainer.data.order import permute_epoch
from trainer.data.tokens import Dataset, Encoded
from trainer.exchange.protocol.actions import Step
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.replica.base import EvalResult
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.run.distributed.optimizer import ParallelAdamW
from trainer.run.distributed.weight_audit import WeightAudit
from trainer.system.errors import BudgetStopError, NonFiniteError, RefusedError, StorageError
from trainer.system.process.stop_signals import StopRequest

if TYPE_CHECKING:
    from trainer.tracking.run_recorder import RunRecorder

_PORTION = 64
"""Validation samples of a copy between two checks for a stop."""
_GO_ON, _EARLY, _STOP, _SPENT, _FAILED = range(5)
OF_ALL = (NonFiniteError, RefusedError, StorageError)
"""Errors that every rank of a run raises alike."""


class Checkpoints(Protocol):
    """Where the state of all ranks is saved; every rank calls it."""

    def save(self, step: int, scores: dict[str, Any] | None) -> None:
        """Save the state after `step` updates, concurrently with training where possible."""
        ...

    def finish(self, step: int) -> None:
        """Leave the files of one process's form; the last step was saved."""
        ...

    def give_up(self, error: BaseException) -> None:
        """End what is under way: the run is over by an error, which other ranks may not have."""
        ...


@dataclass(kw_only=True)
class DistributedRun:
    """One rank of a run; `stop` on any rank ends it on all after the current step.

    So does the budget guard of rank 0, with an exit code of its own.
    """

    config: RunConfig
    plan: StepPlan
    replica: ParallelReplica
    optimizer: ParallelAdamW
    audit: WeightAudit
    checkpoints: Checkpoints
    train: Dataset
    validation: Dataset | None
    recorder: RunRecorder | None
    """On rank 0."""
    stop: StopRequest
    step: int
    """Applied updates."""
    generation: int
    """The number of earlier starts of the run."""
    _saved: int = field(init=False)
    _proved: int = -1
    _order: tuple[int, np.ndarray] | None = None

    def __post_init__(self) -> None:
        self._saved = self.step

    def run(self) -> tuple[str, int]:
        """Train until the run is over or stopped, and return how it ended, with its exit code.

        Raises:
            NonFiniteError: NaN or Inf in a loss or gradient; the last checkpoint stays.
            RefusedError: a rank holds other weights than its copies; likewise.
            StorageError: two saves in a row have failed.
        """
        try:
            ended = self._train_until_stopped()
            self._save_once()
            self.checkpoints.finish(self.step)
        except BaseException as error:
            self.checkpoints.give_up(error)
            raise
        return ended

    def _train_until_stopped(self) -> tuple[str, int]:
        """Apply all updates that are left; return why these were the last, and the exit code."""
        if self.config.exchange.is_ring:
            self._compare_weights()
        while self.step < self.plan.total_steps:
            if ended := self._agree_on_stop():
                return ended
            self._train_step()
            self._after_step()
        return "all steps are done", 0

    def _agree_on_stop(self) -> tuple[str, int] | None:
        """Return why all ranks stop now, with the exit code; None if none has a reason.

        Raises:
            StorageError: rank 0 can no longer save.
        """
        failure = self.recorder and self.recorder.failure
        ending = self.recorder and self.recorder.ending
        early = self.recorder and self.recorder.early.stop_reason
        mine = _FAILED if failure else _SPENT if ending else _STOP if self.stop else _GO_ON
        mine = _EARLY if early and mine == _GO_ON else mine
        worst = torch.tensor(mine)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if int(worst) == _FAILED:
            raise failure or StorageError("rank 0 can no longer save")
        if int(worst) == _SPENT:
            reason = ending or "the budget guard of rank 0 stopped the run"
            return reason, BudgetStopError.exit_code
        if int(worst) == _STOP:
            return self.stop.reason or "stopped by another rank", 0
        if int(worst) == _EARLY:
            return early or "early stopping by rank 0", 0
        return None

    def _train_step(self) -> None:
        """Forward, backward and update over one batch."""
        # 1. What the step takes.
        began, number = time.monotonic(), self.step + 1
        rate = compute_learning_rate(self.step, self.plan.total_steps, self.config.optimizer)
        at = self.plan.find_samples(self.step)
        # 2. Forward and backward over this copy's samples.
        result = self.replica.accumulate(self._local_samples(at.epoch, range(at.start, at.stop)))
        if not math.isfinite(result.loss_sum):
            what = f"a loss that is not finite in samples {at.start}..{at.stop}"
            raise NonFiniteError.at_step(number, what)
        # 3. The update, the same on every rank; from here on the step counts.
        norm = self.optimizer.apply(number, rate)
        self.step = number
        # 4. Rank 0 records it.
        if self.recorder is None:
            return
        seconds = time.monotonic() - began
        self.recorder.log_step(
            Step(
                step=number,
                epoch=at.epoch,
                generation=self.generation,
                loss=mean_loss(result.loss_sum, result.weight),
                learning_rate=rate,
                grad_norm=norm,
                seconds=seconds,
                tokens_per_second=result.tokens / seconds,
                sample_ranges=self.replica.samples_by_copy(at.start, at.stop),
            )
        )

    def _after_step(self) -> None:
        """Compare weights, validate and save if that is due."""
        if self.config.exchange.is_ring and self.step % self.config.exchange.hash_every == 0:
            self._compare_weights()
        every = self.config.training.evaluate_every
        due = self.step == self.plan.total_steps or (every > 0 and self.step % every == 0)
        if due and self.validation is not None:
            scores = self._evaluate_samples(self.validation)
            if self.recorder is not None:
                self.recorder.emit({"event": "validation", "at_step": self.step, **scores})
            self._save_once(scores)
        elif self.step % self.config.checkpoint.every == 0:
            self._save_once()

    def _evaluate_samples(self, samples: Dataset) -> dict[str, Any]:
        """Return the scores of all samples."""
        parts: list[EvalResult] = []
        portion = _PORTION * self.replica.copies
        for start in range(0, len(samples), portion):
            share = self.replica.local_samples(min(portion, len(samples) - start))
            parts.append(self.replica.evaluate([samples[start + index] for index in share]))
        return EvalResult.sum_parts(parts).compute_scores()

    def _save_once(self, scores: dict[str, Any] | None = None) -> None:
        """Save the current step unless it was saved; the state is proved first."""
        if self.step == self._saved:
            return
        self._compare_weights()
        self._saved = self.step
        self.checkpoints.save(self.step, scores)

    def _compare_weights(self) -> None:
        """Compare the ranks' weights unless this step's were."""
        if self.step == self._proved:
            return
        digest, self._proved = self.audit.compare_digests(self.step), self.step
        if self.recorder is not None and digest is not None:
            ranks = list(range(dist.get_world_size()))
            self.recorder.emit(
                {"event": "verified", "at_step": self.step, "digest": digest, "ranks": ranks}
            )

    def _local_samples(self, epoch: int, positions: range) -> list[Encoded]:
        """Return this copy's part of a step's samples."""
        if self._order is None or self._order[0] != epoch:
            order = permute_epoch(self.config.training.seed, epoch, len(self.train))
            self._order = epoch, order
        order = self._order[1]
        return [
            self.train[int(order[positions.start + index])]
            for index in self.replica.local_samples(len(positions))
        ]
