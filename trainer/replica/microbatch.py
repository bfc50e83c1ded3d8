"""Split a shard into micro-batches of similar lengths, optionally with several samples a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FIXED_COST = 1 / 16
"""A micro-batch's fixed cost as a share of a full one: 50 to 80 of 1,024 tokens on a CPU, for a
model of 0.7 M weights."""


@dataclass(frozen=True)
class MicroBatchLimit:
    """The limit of one micro-batch; padding counts as tokens."""

    samples: int
    """Rows, if several samples share one."""
    tokens: int

    def halve_limit(self, samples: int, tokens: int) -> MicroBatchLimit | None:
        """Return half of what did not fit, or None if that was a single sample."""
        if samples <= 1:
            return None
        return MicroBatchLimit(max(1, samples // 2), max(1, tokens // 2))


def split_by_length(lengths: Sequence[int], limit: MicroBatchLimit) -> list[list[int]]:
    """Return sample indices by micro-batch, longest first: the cheapest split.

    Every sample of a micro-batch costs as many tokens as its longest, and a micro-batch costs
    `FIXED_COST` more. A sample above the token limit is alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    widths = [max(1, lengths[index]) for index in order]
    fixed = FIXED_COST * limit.tokens
    costs, starts = [0.0], [0]  # of the best split of the first samples
    for stop in range(1, len(order) + 1):
        best, at = float("inf"), stop - 1
        for start in range(stop - 1, -1, -1):
            rows = stop - start
            if rows > 1 and rows > min(limit.samples, limit.tokens // widths[start]):
                break
            cost = costs[start] + rows * widths[start] + fixed
            if cost <= best:
                best, at = cost, start
        costs.append(best)
        starts.append(at)
    groups: list[list[int]] = []
    stop = len(order)
    while stop:
        groups.append(order[starts[stop] : stop])
        stop = starts[stop]
    return groups[::-1]


def pack_rows(lengths: Sequence[int], width: int) -> list[list[int]]:
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
