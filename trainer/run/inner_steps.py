"""A worker's part of a round (DiLoCo, arXiv:2311.08105): AdamW steps of its own on its shard.

AdamW's moments, which it keeps between rounds, are private to it and can be lost without harm. A
flush round synchronises them: the second moments, which accumulate over a thousand steps, are
averaged over the workers; the first moments, which accumulate over ten, start again at zero.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.config.optimizer import OptimizerConfig
from trainer.data.tokens import Encoded
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.adamw import AdamW, TrainState, compute_power, square_sum
from trainer.optimizer.learning_rate import compute_learning_rate
from trainer.replica.base import Replica, StepResult

Float32 = NDArray[np.float32]


def split_into_steps(samples: int, inner_batch: int) -> list[range]:
    """Return the samples of each inner step on a shard: about `inner_batch`, as even as can be."""
    steps = max(1, round(samples / inner_batch)) if samples else 0
    ends = [samples * step // steps for step in range(steps + 1)] if steps else [0]
    return [range(start, stop) for start, stop in pairwise(ends)]


@dataclass(frozen=True)
class InnerStepsResult:
    """The result of the inner steps on a shard."""

    result: StepResult
    """Sums over the samples that were taken, each loss by the weights of its inner step."""
    samples: int
    """So many from the start of the shard; fewer than it has if the time was over."""
    block: Callable[[int], Float32]
    """The contribution to a block: see `InnerSteps.train_shard`."""


class InnerSteps:
    """The inner optimizer of one worker, from the state that it was given on.

    Besides `common` it holds three vectors: its own weights, the first moment and a gradient. Its
    second moment takes the place of the common one, which nothing else reads.

    Args:
        common: weights and outer momentum that all members have, moved by the outer update alone.
    """

    def __init__(
        self,
        replica: Replica,
        settings: OptimizerConfig,
        plan: StepPlan,
        common: TrainState,
    ) -> None:
        self._replica = replica
        self._layout = replica.layout
        self._settings = settings
        self._plan = plan
        self._common = common
        self._optimizer = AdamW(settings, self._layout)
        self._weights = np.empty_like(common.weights)
        self._gradient = np.empty_like(common.weights)
        self._reset_local_state(common.step)

    def train_shard(
        self,
        batch: Sequence[Encoded],
        step: int,
        inner_batch: int,
        *,
        alpha: float | None = None,
        limit: float | None = None,
    ) -> InnerStepsResult:
        """Train from the common weights on over a shard of round `step`.

        A block's contribution is w (common - own weights), fp32, with the weight w of the samples
        taken, so that contributions add up and are divided as gradients are. A flush round has as
        many blocks again, w times the second moment. If a gradient is not finite the steps end,
        and its blocks are the contribution: the coordinator then names the tensor.

        Args:
            batch: the shard's samples, in their order.
            step: of the run, counted from 0.
            inner_batch: samples of an inner step, about.
            alpha: see `Replica.forward_backward`.
            limit: seconds after which no further inner step is begun.
        """
        # 1. Begin at the common weights.
        began = time.perf_counter()
        self._weights[...] = self._common.weights
        self._replica.write_trainable(self._weights)
        results: list[StepResult] = []
        taken = 0
        own = TrainState(self._weights, self._first, self._common.second_moment, self._taken)
        pieces = split_into_steps(len(batch), inner_batch)
        for index, piece in enumerate(pieces):
            if index and limit is not None and time.perf_counter() - began > limit:
                break
            # 2. For each inner step: the gradient of some samples, and an update of one's own.
            result = self._replica.forward_backward(
                batch[piece.start : piece.stop], self._store_block, alpha
            )
            results.append(result)
            taken = piece.stop
            if not np.isfinite(self._gradient).all():
                return InnerStepsResult(
                    _sum_results(results, began), len(batch), self._gradient_block
                )
            if result.weight:
                self._gradient /= np.float32(result.weight)
            self._apply_inner_update(own, self._plan.find_inner_steps(step), index / len(pieces))
            self._replica.write_trainable(self._weights)
        # 3. How far that moved the weights, a block at a time as they are asked for.
        self._taken = own.step
        total = _sum_results(results, began)
        return InnerStepsResult(
            total, taken, lambda block: self._compute_contribution(step, block, total.weight)
        )

    def order_blocks(self, step: int) -> tuple[int, ...]:
        """Return the blocks of a round, in the order in which they leave."""
        order, count = self._layout.send_order, len(self._layout.blocks)
        second = (
            tuple(count + index for index in order) if self._plan.flushes_residuals(step) else ()
        )
        return (*order, *second)

    def on_outer_update(self, step: int) -> None:
        """Note that the outer update of a round was applied to the common state."""
        if self._plan.flushes_residuals(step):
            self._reset_local_state(step + 1)

    def _reset_local_state(self, done: int) -> None:
        """Forget what is private; the second moment is that of the last flush round.

        Before the first round both moments are those of the ordinary steps.
        """
        self._taken = self._restarted = self._plan.count_flushed(done)
        if done == self._plan.first_outer_step:
            self._first, self._restarted = self._common.first_moment.copy(), 0
        else:
            self._first = np.zeros_like(self._common.weights)

    def _store_block(self, index: int, gradient: Float32) -> None:
        block = self._layout.blocks[index]
        self._gradient[block.start : block.stop] = gradient

    def _apply_inner_update(self, own: TrainState, inner: range, progress: float) -> None:
        """Apply the gradient, clipped by its own norm, at the rate of this part of the round."""
        blocks = self._layout.blocks
        norm = math.sqrt(math.fsum(square_sum(self._gradient[b.start : b.stop]) for b in blocks))
        at = inner.start + int(progress * len(inner) + 1e-9)
        rate = compute_learning_rate(at, self._plan.total_inner, self._settings)
        scale = self._optimizer.clip_scale(norm)
        self._optimizer.apply(own, self._gradient, rate, scale, self._restarted)

    def _compute_contribution(self, step: int, index: int, weight: int) -> Float32:
        count = len(self._layout.blocks)
        block = self._layout.blocks[index % count]
        span = slice(block.start, block.stop)
        if index < count:
            moved = np.subtract(self._common.weights[span], self._weights[span])
            return np.multiply(moved, np.float32(weight), out=moved)
        # Of as many steps as the plan has until here, whatever this worker's speed: a mean needs
        # one bias for all, which `_reset_local_state` then counts from.
        beta, due = self._settings.beta2, self._plan.find_inner_steps(step).stop
        bias = (
            (1 - compute_power(beta, due)) / (1 - compute_power(beta, self._taken))
            if self._taken
            else 0.0
        )
        return self._common.second_moment[span] * np.float32(bias * weight)

    def _gradient_block(self, index: int) -> Float32:
        block = self._layout.blocks[index % len(self._layout.blocks)]
        return self._gradient[block.start : block.stop]


def _sum_results(results: Sequence[StepResult], began: float) -> StepResult:
    return StepResult(
        loss_sum=sum(result.loss_sum for result in results),
        weight=sum(result.weight for result in results),
        tokens=sum(result.tokens for result in results),
        seconds=time.perf_counter() - began,
    )
