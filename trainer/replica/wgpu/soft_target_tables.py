"""A teacher's predictions of each target, as tables for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.soft_targets import SoftTargets
    from trainer.data.tokens import Encoded


@dataclass(frozen=True)
class SoftTargetTables:
    """The targets of consecutive samples: N rows of K entries."""

    classes: NDArray[np.uint32]
    """`[N, K]`"""
    weights: NDArray[np.float32]
    """`[N, K]`, 0 after the last entry of a row."""
    entropy: float
    """Of all rows together, in nats: their cross-entropy less this is the divergence."""


def table_width(samples: Sequence[Encoded], places: Sequence[NDArray[np.int64]]) -> int:
    """Return the most entries of any target, rounded up to a power of two for fewer recordings."""
    most = 1
    for sample, chosen in zip(samples, places, strict=True):
        counts = np.diff(_soft_targets(sample).offsets)[chosen]
        most = max(most, int(counts.max(initial=0)))
    return 1 << (most - 1).bit_length()


def make_tables(
    samples: Sequence[Encoded], places: Sequence[NDArray[np.int64]], width: int
) -> SoftTargetTables:
    """Return the entries of every target; `places` are the positions of each sample's, ascending.

    Raises:
        InputError: a part of a distribution is stored only as a sum.
    """
    classes: list[NDArray[np.uint32]] = []
    weights: list[NDArray[np.float32]] = []
    entropy = 0.0
    for sample, chosen in zip(samples, places, strict=True):
        soft = _soft_targets(sample)
        if soft.rest[chosen].any():
            raise InputError(
                "the wgpu engine does not compute logits whose tail is one number (tail_samples"
                " 0): use --gpu-backend cuda or cpu"
            )
        counts = np.diff(soft.offsets)
        wanted = np.zeros(len(counts), bool)
        wanted[chosen] = True
        entries = np.repeat(wanted, counts)
        there = np.arange(width) < counts[chosen, None]
        ids, shares = np.zeros(there.shape, np.uint32), np.zeros(there.shape, np.float32)
        ids[there], shares[there] = soft.ids[entries], soft.weights[entries]
        classes.append(ids)
        weights.append(shares)
        entropy += float(soft.entropy[chosen].sum(dtype=np.float64))
    return SoftTargetTables(np.concatenate(classes), np.concatenate(weights), entropy)


def _soft_targets(sample: Encoded) -> SoftTargets:
    assert sample.soft is not None, "a sample of a distillation has no teacher"
    return sample.soft
