"""A shard becomes micro-batches: sorted by length, within a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """How much one micro-batch may hold; padding counts as tokens."""

    samples: int
    tokens: int

    def halved(self, samples: int, tokens: int) -> Limit | None:
        """Return half of what did not fit, or None when that was a single sample."""
        if samples <= 1:
            return None
        return Limit(max(1, samples // 2), max(1, tokens // 2))


def split(lengths: Sequence[int], limit: Limit) -> list[list[int]]:
    """Return sample indices by micro-batch, longest first.

    Sorting cuts padding, and the largest micro-batch comes first, so memory runs out at the
    start of a step or not at all. A sample above the token limit stands alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    groups: list[list[int]] = []
    width = 0
    for index in order:
        room = groups and len(groups[-1]) < min(limit.samples, limit.tokens // width)
        if not room:
            groups.append([])
            width = max(1, lengths[index])
        groups[-1].append(index)
    return groups
