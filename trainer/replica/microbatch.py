"""A shard becomes micro-batches: sorted by length, several to a row where wanted, in a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """How much one micro-batch may hold; padding counts as tokens."""

    samples: int
    """Rows, where several samples share one."""
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


def pack(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Return sample indices by row of at most `width` tokens: each sample where it first fits.

    The longest go first (first-fit decreasing), so at most 11 / 9 of the fewest rows are taken. A
    longer sample has a row to itself.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        row = next((row for row, room in enumerate(free) if lengths[index] <= room), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows
