"""The learning rate of each update. The coordinator computes it, and sends it as a number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config.optimizer import OptimizerConfig


def compute_learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of update `step` of `total_steps`, counted from 0.

    Linear warmup to the peak over `warmup_ratio` of all steps, then `scheduler`. The values are
    those of transformers' schedules one step on: theirs give the first update a rate of 0, and
    reach their final rate after the last one.
    """
    assert 0 <= step < total_steps, (step, total_steps)
    warmup = max(1, round(config.warmup_ratio * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.scheduler == "constant":
        return config.learning_rate
    falls_from = warmup
    if config.scheduler == "wsd":
        falls_from = max(warmup, total_steps - max(1, round(config.decay_fraction * total_steps)))
    progress = max(0, step + 1 - falls_from) / (total_steps - falls_from)
    shape = 1 - progress if config.scheduler == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * shape)
