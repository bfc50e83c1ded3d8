"""Running totals over the steps that count, and what a ledger says of a step's samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

_MOST_BACK = 20_000
"""Steps behind the last one to which a resumed run can return without losing the sums."""

Sums = tuple[int, int, int, int, int]
"""Samples, missing and repeated ones, tokens, and bytes."""


class Step(Protocol):
    """The figures of a step that are summed up."""

    step: int
    epoch: int
    tokens_per_second: float | None
    seconds: float | None
    exchange_bytes: int


class RunningTotals:
    """Sums over the steps that count: samples, missing and repeated ones, tokens, and bytes.

    A resumed run goes on with the sums of the step from which it does.
    """

    def __init__(self) -> None:
        self.place: tuple[int, int] | None = None
        """The epoch of the last step, and the sample behind it in the epoch's order."""
        self._sums: Sums = (0, 0, 0, 0, 0)
        self._last = deque[tuple[int, tuple[int, int], Sums]](maxlen=_MOST_BACK)
        """The last steps, each with its position in the data and the running sums."""

    def add_step(self, step: Step, ledger: Sequence[int]) -> Sums:
        """Count a step, of which the ledger was `counted`, and return the sums."""
        first, behind, missing, repeated = ledger
        added = behind - first - missing
        if self.place is not None and self.place[0] == step.epoch:
            if first > self.place[1]:
                missing += first - self.place[1]
            else:
                repeated += self.place[1] - first
        tokens = round((step.tokens_per_second or 0.0) * (step.seconds or 0.0))
        before = self._sums
        self.place = (step.epoch, behind)
        self._sums = (
            before[0] + added,
            before[1] + missing,
            before[2] + repeated,
            before[3] + tokens,
            before[4] + step.exchange_bytes,
        )
        self._last.append((step.step, self.place, self._sums))
        return self._sums

    def return_to(self, step: int) -> None:
        """Forget the steps behind one; of one that is too long ago nothing is known."""
        for number, place, sums in reversed(self._last):
            if number == step:
                self.place, self._sums = place, sums
                return
        self.place, self._sums = None, self._sums if step else (0, 0, 0, 0, 0)


def count_samples(samples: Sequence[Sequence[int]]) -> list[int]:
    """Return of a step's ledger: first sample, behind the last, missing ones, repeated ones.

    `samples` are [rank, start, stop] in the epoch's order; all counted exactly once if the last
    two figures are 0.
    """
    if samples:  # nearly always in order, each part behind the one before
        first = reached = samples[0][1]
        for _, start, stop in samples:
            if start != reached or stop <= start:
                break
            reached = stop
        else:
            return [first, reached, 0, 0]
    parts = sorted((start, stop) for _, start, stop in samples if stop > start)
    if not parts:
        return [0, 0, 0, 0]
    missing = repeated = 0
    reached = parts[0][1]
    for start, stop in parts[1:]:
        if start > reached:
            missing += start - reached
        elif start < reached:
            repeated += min(stop, reached) - start
        reached = max(reached, stop)
    return [parts[0][0], reached, missing, repeated]
