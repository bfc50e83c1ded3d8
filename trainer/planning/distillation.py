"""Seconds of a distillation: teachers score a corpus while a student learns from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.planning.device_models import DeviceModel
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import AUTOCAST, FP32, TrainingSetup
from trainer.planning.time import EFFICIENCY, find_speed, forward_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The teachers' computation: the forward of every token of a corpus."""

    shape: ModelShape
    """The teacher's."""
    tokens: float
    windows: float
    """Samples of the student."""
    shards: int
    """Teacher i of n scores each nth, from the ith on."""
    missing: int
    """Shards that are not scored yet."""


def scoring_seconds(
    scoring: Scoring,
    teachers: Sequence[DeviceModel],
    *,
    seen: float = 1.0,
    wide: bool = False,
) -> float | None:
    """Return the seconds until the last teacher has scored its part; None: a speed is unknown.

    Args:
        teachers: the device of each.
        seen: share of the corpus that the student reads; the rest is not waited for.
        wide: products in fp32, which processors are assumed to take.
    """
    done = scoring.shards - scoring.missing
    left = min(scoring.missing, max(0.0, seen * scoring.shards - done))
    if not left or not scoring.windows:
        return 0.0
    length = scoring.tokens / scoring.windows
    a_shard = scoring.tokens / scoring.shards * forward_flops_per_token(scoring.shape, length).value
    found = 0.0
    for place, device in enumerate(teachers):
        on_host = device.name.startswith("CPU")
        precision = FP32 if wide or on_host else AUTOCAST
        speed = find_speed(device, TrainingSetup(precision=precision, on_host=on_host))
        if speed is None:
            return None
        # Whole shards: with fewer than teachers, some have none.
        shards = max(0.0, -(-(left - place) // len(teachers)))
        found = max(found, min(shards, left) * a_shard / (speed * EFFICIENCY))
    return found


def distillation_seconds(scoring: float, learning: float, first: float) -> float:
    """Return the seconds of a run whose student reads windows as they are scored.

    The slower of the two decides the first pass over the corpus: `max(scoring, first * learning) +
    (1 - first) * learning`.

    Args:
        scoring: the teachers' seconds that are left.
        learning: the student's.
        first: share of the student's steps that read a window for the first time.
    """
    return max(scoring, first * learning) + (1 - first) * learning
