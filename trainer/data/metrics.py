"""Validation figures from a confusion matrix: accuracy, Matthews correlation, mean loss. Pure.

Everywhere `confusion[label][prediction]` counts samples, shape [C, C]. Counts are Python integers,
so the figures do not depend on the order in which workers report their parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Confusion = Sequence[Sequence[int]]


def accuracy(confusion: Confusion) -> float:
    """Return the share of samples on the diagonal; 0 for no samples."""
    total = sum(sum(row) for row in confusion)
    correct = sum(row[label] for label, row in enumerate(confusion))
    return correct / total if total else 0.0


def matthews(confusion: Confusion) -> float:
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


def mean_loss(loss_sum: float, weight: int) -> float | None:
    """Return the loss per sample or token; None if nothing was counted."""
    return loss_sum / weight if weight else None


def add_confusion(total: Confusion, part: Confusion) -> list[list[int]]:
    """Return the sum of two confusion matrices of the same size."""
    return [
        [a + b for a, b in zip(row, other, strict=True)]
        for row, other in zip(total, part, strict=True)
    ]
