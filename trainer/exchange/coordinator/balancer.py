"""The number of samples of each worker: assignments by measured speed, in whole samples.

A worker with overhead o seconds and speed c samples a second needs t(b) = o + b/c for b samples.
The split minimises the slowest worker's time; a worker that would only slow the step gets none.
Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

SMOOTHING = 0.5
"""Weight of the newest measurement: three steps after a change 7/8 of it is in the estimate."""
CHANGE_FACTOR = 1.5
"""A cost a sample that is so many times larger or smaller is a change of speed, not noise."""
AFTER_CHANGE = 0.75
"""Weight of a measurement that shows a change: two steps later 15/16 of it is in the estimate."""
KEEP_WITHIN = 0.05
"""A split is kept while a new one would shorten the step by less than this share."""
LATE_FACTOR = 1.5
"""Times the expected seconds of the slowest share after which a worker is late."""
PROBE_EVERY = 20
"""Steps after which an idle worker gets a single sample, to see whether it got faster."""


@dataclass(frozen=True)
class Speed:
    """Time that a worker needs: seconds before and after a shard, and per sample of it."""

    overhead: float
    per_sample: float

    def estimate_seconds(self, samples: int) -> float:
        """Return the expected seconds for a shard of so many samples; 0 for none."""
        return self.overhead + samples * self.per_sample if samples else 0.0

    def average_in(self, samples: int, compute: float, elapsed: float) -> Speed:
        """Return the moving average after a shard took `compute` of `elapsed` seconds."""
        new = measure_speed(samples, compute, elapsed)
        changed = not 1 / CHANGE_FACTOR < new.per_sample / self.per_sample < CHANGE_FACTOR
        weight = AFTER_CHANGE if changed else SMOOTHING
        return Speed(
            self.overhead + SMOOTHING * (new.overhead - self.overhead),
            self.per_sample + weight * (new.per_sample - self.per_sample),
        )


def measure_speed(samples: int, compute: float, elapsed: float) -> Speed:
    """Return the speed seen in one shard of at least one sample."""
    return Speed(max(elapsed - compute, 0.0), max(compute, 1e-9) / samples)


def split_samples(samples: int, speeds: Mapping[int, Speed]) -> dict[int, int]:
    """Return samples per rank that minimise the time of the slowest rank.

    Gives each sample to the rank that would finish it first; t is increasing in b, so this greedy
    choice is optimal. Memory caps nothing here: a shard runs in micro-batches that fit.
    """
    assignments = dict.fromkeys(speeds, 0)
    queue = [(speed.estimate_seconds(1), rank) for rank, speed in speeds.items()]
    heapq.heapify(queue)
    for _ in range(samples):
        _, rank = heapq.heappop(queue)
        assignments[rank] += 1
        heapq.heappush(queue, (speeds[rank].estimate_seconds(assignments[rank] + 1), rank))
    return assignments


def split_by_weight(samples: int, weights: Mapping[int, float]) -> dict[int, int]:
    """Return samples per rank in proportion to `weights`, by largest remainder."""
    total = sum(weights.values())
    exact = {rank: samples * weight / total for rank, weight in weights.items()}
    assignments = {rank: int(value) for rank, value in exact.items()}
    by_remainder = sorted(exact, key=lambda rank: (assignments[rank] - exact[rank], rank))
    for rank in by_remainder[: samples - sum(assignments.values())]:
        assignments[rank] += 1
    return assignments


def estimate_step_seconds(assignments: Mapping[int, int], speeds: Mapping[int, Speed]) -> float:
    """Return the expected seconds of a step under a split."""
    return max(speeds[rank].estimate_seconds(count) for rank, count in assignments.items())


class Balancer:
    """Keeps the speed estimates of all ranks and the split in force."""

    def __init__(self, policy: str | tuple[float, ...]) -> None:
        self.policy = policy
        self.speeds: dict[int, Speed] = {}
        self._last_assignments: dict[int, int] = {}
        self._idle_for: dict[int, int] = {}
        self.tried: set[int] = set()
        """Ranks whose part of the last division is a single sample that shows their speed."""

    def observe_shard(self, rank: int, samples: int, compute: float, elapsed: float) -> None:
        """Update a rank's estimate by a finished shard; times in seconds."""
        known = self.speeds.get(rank)
        # What comes on top of a first shard is start-up, and says nothing about the next one.
        self.speeds[rank] = (
            known.average_in(samples, compute, elapsed)
            if known
            else measure_speed(samples, compute, elapsed=compute)
        )

    def divide_samples(self, samples: int, ranks: list[int]) -> dict[int, int]:
        """Return samples per rank for a step."""
        self.tried.clear()
        if isinstance(self.policy, tuple):
            weights = {r: self.policy[r] if r < len(self.policy) else 1.0 for r in ranks}
            if sum(weights.values()) > 0:
                return split_by_weight(samples, weights)
        if self.policy != "measured" or not any(rank in self.speeds for rank in ranks):
            return split_by_weight(samples, dict.fromkeys(ranks, 1.0))
        speeds = self._fill_in_speeds(ranks)
        best = split_samples(samples, speeds)
        kept = self._last_assignments
        if set(kept) == set(ranks) and sum(kept.values()) == samples:
            gain = estimate_step_seconds(kept, speeds) - estimate_step_seconds(best, speeds)
            if gain < KEEP_WITHIN * estimate_step_seconds(kept, speeds):
                best = kept
        self._last_assignments = dict(best)
        return self._add_probes(dict(best))

    def divide_proportionally(self, samples: int, ranks: list[int]) -> dict[int, int]:
        """Return samples per rank in proportion to speed, for work outside the usual step."""
        measured_ranks = self.policy == "measured" and any(rank in self.speeds for rank in ranks)
        speeds = self._fill_in_speeds(ranks) if measured_ranks else {}
        return split_by_weight(
            samples, {r: 1 / speeds[r].per_sample if r in speeds else 1.0 for r in ranks}
        )

    def find_fastest(self, ranks: list[int]) -> int:
        """Return the rank that computes a sample soonest, as far as that is known."""
        speeds = self.speeds
        return min(ranks, key=lambda r: speeds[r].per_sample if r in speeds else float("inf"))

    def estimate_seconds(self, assignments: Mapping[int, int]) -> float:
        """Return the expected seconds of the slowest measured rank; 0 when none was measured."""
        known = {rank: count for rank, count in assignments.items() if rank in self.speeds}
        return estimate_step_seconds(known, self.speeds) if known else 0.0

    def compute_limit(self, assignments: Mapping[int, int]) -> float | None:
        """Return the seconds after which a worker is late, and others could take its samples.

        None where the assignments must not depend on the time, and where nothing is known yet.
        """
        if self.policy != "measured" or sum(map(bool, assignments.values())) < 2:
            return None
        return LATE_FACTOR * self.estimate_seconds(assignments) or None

    def _fill_in_speeds(self, ranks: list[int]) -> dict[int, Speed]:
        """Return a speed per rank; a newcomer is taken for a typical one until measured."""
        known = sorted(
            (self.speeds[rank] for rank in ranks if rank in self.speeds),
            key=lambda speed: speed.per_sample,
        )
        typical = known[len(known) // 2]
        return {rank: self.speeds.get(rank, typical) for rank in ranks}

    def _add_probes(self, assignments: dict[int, int]) -> dict[int, int]:
        for rank, count in list(assignments.items()):
            idle_for = self._idle_for.get(rank, 0) + 1 if count == 0 else 0
            self._idle_for[rank] = idle_for % PROBE_EVERY
            donor = max(assignments, key=lambda r: assignments[r])
            if idle_for == PROBE_EVERY and assignments[donor] > 1:
                self.tried.add(rank)
                assignments[rank], assignments[donor] = 1, assignments[donor] - 1
        return assignments
