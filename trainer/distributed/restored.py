"""A checkpoint that rank 0 has read, on every rank."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from trainer.optimizer import TrainState


def share_state(state: TrainState | None, size: int, step: int) -> TrainState:
    """Return rank 0's state on every rank.

    Args:
        state: rank 0's, None on the others.
        size: of its vectors.
    """
    if state is None:
        weights, first, second = (np.empty(size, np.float32) for _ in range(3))
        state = TrainState(weights, first, second, step)
    for vector in (state.weights, state.first_moment, state.second_moment):
        dist.broadcast(torch.from_numpy(vector), 0)
    return state
