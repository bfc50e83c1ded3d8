"""Validation figures from a confusion matrix: accuracy, Matthews correlation, mean loss. Pure.

Everywhere `confusion[label][prediction]` counts samples, shape [C, C]. Counts are Python integers,
so the figures do not depend on the order in which workers report their parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field

from trainer.system.untrusted_data import LARGEST_FLOAT

Figure = Annotated[float, Field(gt=-LARGEST_FLOAT, lt=LARGEST_FLOAT)]
MOST_FIGURES = 16
Figures = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], Figure],
    Field(max_length=MOST_FIGURES),
]
"""Figures by name: of a script its own, of pairs their rewards."""
Confusion = Sequence[Sequence[int]]


def compute_accuracy(confusion: Confusion) -> float:
    """Return the share of samples on the diagonal; 0 for no samples."""
    total = sum(sum(row) for row in confusion)
    correct = sum(row[label] for label, row in enumerate(confusion))
    return correct / total if total else 0.0


def compute_matthews(confusion: Confusion) -> float:
    """Return the multiclass Matthews correlation R_K in [-1, 1] (Gorodkin 2004, eq. 8).

    0 when it is undefined: no samples, one class only, or constant predictions.
    """
    labels = [sum(row) for row in confusion]
    predictions = [sum(column) for column in zip(*confusion, strict=True)]
    total = sum(labels)
    correct = sum(row[label] for label, row in enumerate(confusion))
    covariance = correct * total - sum(p * t for p, t in zip(predictions, labels, strict=True))
    # Integers up to here: the two spreads are exactly zero for a constant, never nearly zero.
    spread = (total**2 - sum(p * p for p in predictions)) * (total**2 - sum(t * t for t in labels))
    return covariance / math.sqrt(spread) if spread else 0.0


def class_scores(confusion: Confusion) -> dict[str, float]:
    """Return both figures of a classifier by name."""
    return {"accuracy": compute_accuracy(confusion), "mcc": compute_matthews(confusion)}


def mean_loss(loss_sum: float, weight: int) -> float | None:
    """Return the loss per sample or token; None if nothing was counted."""
    return loss_sum / weight if weight else None


def sum_figures(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each named figure that all parts have."""
    known = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
    return {name: sum(part[name] for part in parts) for name in known}


def name_rewards(chosen: float, rejected: float, right: float) -> dict[str, float]:
    """Return sums over pairs of answers by name; TRL has the means as `rewards/chosen` and so on.

    Args:
        chosen, rejected: beta times how much likelier each answer became than it was.
        right: pairs of which the chosen answer has the higher reward.
    """
    return {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": right,
    }


def sum_confusions(tables: Iterable[Confusion | None]) -> list[list[int]] | None:
    """Return the sum of confusion matrices of the same size; None if there is none."""
    known = [table for table in tables if table is not None]
    total = [[sum(c) for c in zip(*rows, strict=True)] for rows in zip(*known, strict=True)]
    return total or None
