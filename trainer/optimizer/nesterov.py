"""The update that all members apply after a commit: AdamW, or the outer update of DiLoCo.

DiLoCo's (arXiv:2311.08105) is Nesterov momentum on the workers' deltas of the weights.

As deterministic as `AdamW`, and for the same reason: separate NumPy operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.optimizer.adamw import CHUNK, AdamW

if TYPE_CHECKING:
    from trainer.config.run import RunConfig
    from trainer.model.layout import GradientLayout
    from trainer.optimizer.adamw import Gradient, TrainState


class OuterNesterov:
    """b <- mu b + d, weights <- weights - eta (d + mu b), with the pseudo-gradient d.

    d is the weighted mean of (weights - a worker's weights after its inner steps). b is the state's
    first moment. The second moment of the state is the mean of the workers' own of the last step
    that flushed residuals.
    """

    def __init__(self, learning_rate: float, momentum: float, layout: GradientLayout) -> None:
        self._rate = np.float32(learning_rate)
        self._momentum = np.float32(momentum)
        self._size = layout.size
        self._scratch = np.empty(min(CHUNK, layout.size), np.float32)

    def apply(self, state: TrainState, average: Gradient) -> None:
        """Move `state` by one outer update; the average is not changed.

        Args:
            state: moved in place, or onto fresh arrays while a snapshot of it is alive.
            average: fp32 [N]: the pseudo-gradient; [2 N] of a flush step: behind it the mean of
                the workers' second moments.
        """
        assert average.size in (self._size, 2 * self._size), average.size
        state.detach_snapshots()
        state.whole = False
        state.step += 1
        for start in range(0, self._size, CHUNK):
            span = slice(start, min(start + CHUNK, self._size))
            delta, momentum, weights = average[span], state.first_moment[span], state.weights[span]
            scratch = self._scratch[: delta.size]
            np.multiply(momentum, self._momentum, out=momentum)
            np.add(momentum, delta, out=momentum)
            np.multiply(momentum, self._momentum, out=scratch)
            np.add(scratch, delta, out=scratch)
            np.multiply(scratch, self._rate, out=scratch)
            np.subtract(weights, scratch, out=weights)
        if average.size > self._size:
            state.second_moment[...] = average[self._size :]
        state.whole = True


class Update:
    """AdamW on the gradient of an ordinary step, the outer update after a round."""

    def __init__(self, config: RunConfig, layout: GradientLayout) -> None:
        exchange = config.exchange
        self._inner = AdamW(config.optimizer, layout)
        self._outer = OuterNesterov(exchange.outer_learning_rate, exchange.outer_momentum, layout)

    def clip_scale(self, norm: float, *, is_round: bool) -> float:
        """Return the factor for an average of this norm; after a round it is 1, the steps clip."""
        return 1.0 if is_round else self._inner.clip_scale(norm)

    def apply(
        self,
        state: TrainState,
        average: Gradient,
        learning_rate: float,
        scale: float,
        first_round: int | None,
    ) -> None:
        """Move `state` by the update of its next step.

        What AdamW had in the first moment is the workers' own from the first round on: the outer
        momentum begins at zero.

        Args:
            state, average, learning_rate, scale: as for `AdamW` and `OuterNesterov`.
            first_round: the number of the first step that is a round; None: none is.
        """
        if first_round is None or state.step < first_round:
            self._inner.apply(state, average, learning_rate, scale)
            return
        if state.step == first_round:
            state.detach_snapshots()
            state.first_moment[...] = 0.0
        self._outer.apply(state, average)
