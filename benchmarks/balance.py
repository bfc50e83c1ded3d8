"""Balance: the speed of unequal workers together over the sum of their speeds alone.

    python benchmarks/balance.py [--batch 64 --batch 128] [--steps 30]

Real coordinator and worker processes on loopback. Workers sleep instead of computing, so that each
one's cost a sample is known (1:2:5, 1:1:10, 1:1:100) and does not depend on this machine's cores.
Every cost is also run alone through the same stack at the same batch; throughput is samples over
wall-clock time in the same window of steps. Then the fastest worker becomes five times slower,
and the steps are counted until every share is within one sample or 5 % of the best split.
JSON: benchmarks/results/balance.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rig.report import Ratio, Report

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec
from trainer.exchange.coordinator.shares import Speed, slowest, split

UNIT = 0.005
"""Seconds a sample of a worker of factor 1."""
MIXES = ((1, 2, 5), (1, 1, 10))
HOPELESS = (1, 1, 100)
WARM_UP = 5
"""Steps after which the shares have settled."""
SOLO_STEPS = 4
SLOWED = 5
"""The factor by which a worker becomes slower during the run."""
ELEMENTS = 36 * 512
TARGET = 0.95
RESPLIT_TARGET = 5


@dataclass(frozen=True)
class Step:
    """One committed step as the coordinator logged it."""

    at: float
    """Monotonic seconds."""
    shares: dict[int, int]

    @property
    def samples(self) -> int:
        """All samples of the step."""
        return sum(self.shares.values())


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    end_on_terminate()
    report = Report("balance")
    for batch in options.batch or [64, 128]:
        factors = sorted({factor for mix in (*MIXES, HOPELESS[:2]) for factor in mix})
        with ThreadPoolExecutor(
            len(factors)
        ) as pool:  # they sleep, so they do not disturb each other
            speeds = pool.map(lambda factor, batch=batch: solo(factor, batch), factors)
            alone = dict(zip(factors, speeds, strict=True))
        for mix in MIXES:
            measure_mix(report, mix, batch, options.steps, alone)
        measure_hopeless(report, batch, options.steps, alone)
        measure_change(report, MIXES[0], batch, options.steps)
    return report.write()


def measure_mix(
    report: Report, mix: Sequence[int], batch: int, steps: int, alone: dict[int, float]
) -> None:
    """Report the throughput of a mix against the sum of its members alone."""
    run = train(mix, batch, WARM_UP + steps)
    together, best = throughput(run[WARM_UP - 1 :]), sum(alone[factor] for factor in mix)
    report.add(
        Ratio(
            f"batch {batch}, costs {named(mix)}, samples a second together",
            together / best,
            f"the sum of each alone ({best:.0f}/s)",
            TARGET,
            "higher",
        ),
        samples_per_second=round(together, 1),
        alone={str(factor): round(alone[factor], 1) for factor in set(mix)},
        whole_samples_allow=round(whole_samples_allow(mix, batch), 4),
        last_shares=run[-1].shares,
    )


def measure_hopeless(report: Report, batch: int, steps: int, alone: dict[int, float]) -> None:
    """Report a mix in which one worker can only slow down the others."""
    run = train(HOPELESS, batch, WARM_UP + steps)
    together, fastest = throughput(run[WARM_UP - 1 :]), alone[min(HOPELESS)]
    idle_after = next((i for i, step in enumerate(run, 1) if step.shares.get(2, 0) == 0), None)
    report.add(
        Ratio(
            f"batch {batch}, costs {named(HOPELESS)}, samples a second together",
            together / fastest,
            f"the fastest alone ({fastest:.0f}/s)",
            1.0,
            "higher",
        ),
        samples_per_second=round(together, 1),
        first_step_without_the_slow_one=idle_after,
    )


def measure_change(report: Report, mix: Sequence[int], batch: int, steps: int) -> None:
    """Report the steps until the shares fit a worker that became slower."""
    change = WARM_UP + steps // 3
    run = train(mix, batch, WARM_UP + steps, change_after=change)
    changed = (mix[0] * SLOWED, *mix[1:])
    best = split(batch, speeds_of(changed))
    needed = next(
        (index for index, step in enumerate(run[change:]) if fits(step.shares, best)),
        steps,
    )
    report.add(
        Ratio(
            f"batch {batch}, {named(mix)}, worker 0 turns {SLOWED}x slower, shares fit after",
            float(needed),
            "one step",
            float(RESPLIT_TARGET),
        ),
        best_shares=best,
        shares_by_step=[step.shares for step in run[change - 1 : change + 10]],
    )


def train(
    mix: Sequence[int], batch: int, steps: int, change_after: int | None = None
) -> list[Step]:
    """Run a cluster of one worker a factor and return its steps."""
    spec = MemberSpec(
        role="worker",
        elements=ELEMENTS,
        workers=len(mix),
        steps=steps,
        address=("127.0.0.1", 0),
        batch=batch,
    )
    done: list[Step] = []
    with LocalCluster() as cluster:
        port = cluster.start_coordinator(spec.as_coordinator())
        for rank, factor in enumerate(mix):
            cluster.start_worker(spec.as_worker(rank, port, cost=UNIT * factor))
        for _, event in cluster.events(timeout=120):
            if event["event"] != "step":
                continue
            shares: dict[int, int] = {}
            for rank, start, stop in event["samples"]:
                shares[rank] = shares.get(rank, 0) + stop - start
            done.append(Step(event["at"], shares))
            if len(done) == change_after:
                cluster.tell("worker 0", f"cost {UNIT * mix[0] * SLOWED}")
    return done


def solo(factor: int, batch: int) -> float:
    """Return the samples a second of one worker alone."""
    return throughput(train((factor,), batch, 1 + SOLO_STEPS))


def throughput(steps: Sequence[Step]) -> float:
    """Return samples a second over all steps but the first, which starts the clock."""
    return sum(step.samples for step in steps[1:]) / (steps[-1].at - steps[0].at)


def fits(shares: dict[int, int], best: dict[int, int]) -> bool:
    """Return whether every share is within one sample or 5 % of the best one."""
    return all(abs(shares.get(rank, 0) - best[rank]) <= max(1, 0.05 * best[rank]) for rank in best)


def speeds_of(mix: Sequence[int]) -> dict[int, Speed]:
    """Return the true speeds of a mix."""
    return {rank: Speed(0.0, UNIT * factor) for rank, factor in enumerate(mix)}


def whole_samples_allow(mix: Sequence[int], batch: int) -> float:
    """Return the best ratio with whole samples: the exact step over the best whole one."""
    speeds = speeds_of(mix)
    exact = batch / sum(1 / speed.per_sample for speed in speeds.values())
    return exact / slowest(split(batch, speeds), speeds)


def named(mix: Sequence[int]) -> str:
    """Return a mix as text."""
    return ":".join(map(str, mix))


if __name__ == "__main__":
    sys.exit(main())
