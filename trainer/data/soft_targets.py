"""A teacher's predictions at each position of a sample, as a student's loss reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config.distillation import DistillationConfig


@dataclass(frozen=True, slots=True, eq=False)
class SoftTargets:
    """Sparse distributions over the student's vocabulary, one for each of T positions.

    Position t holds the teacher's prediction of token t from the tokens before it, as `labels[t]`
    does. Position 0 and what is not learned have no entries. The entries of position t are those
    from `offsets[t]` to `offsets[t + 1]`.
    """

    offsets: NDArray[np.int64]
    """`[T + 1]`"""
    ids: NDArray[np.int32]
    """`[E]` token ids; each at most once in a position."""
    weights: NDArray[np.float32]
    """`[E]` probabilities at the temperature of the loss."""
    rest: NDArray[np.float32]
    """`[T]` probability of all other tokens together; 0 where the weights sum to 1."""
    entropy: NDArray[np.float32]
    """`[T]` entropy of the teacher's distribution in nats: cross-entropy less this is the KL."""
    temperature: float
    """The temperature of the weights."""

    def slice_positions(self, start: int, stop: int) -> SoftTargets:
        """Return the positions from `start` to `stop`, without copying the entries."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return SoftTargets(
            self.offsets[start : stop + 1] - first,
            self.ids[first:last],
            self.weights[first:last],
            self.rest[start:stop],
            self.entropy[start:stop],
            self.temperature,
        )


def compute_alpha(settings: DistillationConfig, step: int, total_steps: int) -> float:
    """Return the divergence's share at a step, counted from 1: a straight line to the last one."""
    if settings.alpha_final is None:
        return settings.alpha
    way = (step - 1) / max(1, total_steps - 1)
    return settings.alpha + way * (settings.alpha_final - settings.alpha)
