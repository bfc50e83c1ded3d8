"""`exchange.codec: auto` beside the better of bf16 and int8, on three links with three step times.

    python benchmarks/auto.py [--rate 10 --rate 50] [--step 0.2] [--megabytes 1.3]

Real processes: a coordinator beside one worker, and another worker on a host of its own behind a
link of that rate each way, in plain text. Workers sleep for a step's time and hand over their
gradient meanwhile, from the last layer on. A ratio is the median step of `auto` after its decision
over that of the faster fixed codec.

Needs root. JSON: benchmarks/results/auto.json. All nine cells take about five minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import COORDINATOR, LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing
from trainer.config.codec import FREE

TARGET = 1.10
RATES = (10, 50, 200)
"""Mbit/s."""
STEPS = (0.05, 0.2, 0.8)
"""Seconds of computing."""
WARM_UP = 3
DECIDED = 15
"""Steps after which `auto` has its codec, and the exchange of a change is over."""
MEASURED = 8
WORKERS = 2


@dataclass(frozen=True)
class Cell:
    """A link and a step time."""

    network: ShapedNetwork
    rate: int
    step: float
    megabytes: float

    @property
    def name(self) -> str:
        """What it is called in the report."""
        return f"{self.rate} Mbit/s, steps of {1e3 * self.step:.0f} ms"

    def events(self, count: int, **settings: str) -> list[dict[str, Any]]:
        """Run until so many steps were committed, and return their events."""
        spec = MemberSpec(
            role="worker",
            elements=int(self.megabytes * 1e6 / 4),
            workers=WORKERS,
            steps=4000,
            batch=WORKERS,
            address=(self.network.address(0), 0),
            settings={
                "exchange.shares": "equal",
                **{f"exchange.{name}": value for name, value in settings.items()},
            },
        )
        found: list[dict[str, Any]] = []
        with LocalCluster() as cluster:
            port = cluster.start_coordinator(spec.as_coordinator(), self.network.inside(0))
            for rank in range(WORKERS):
                worker = spec.as_worker(rank, port, cost=self.step)
                cluster.start_worker(worker, self.network.inside(rank))
            for name, event in cluster.events():
                if name == COORDINATOR and event["event"] == "step":
                    found.append(event)
                    if event["step"] >= count:
                        break
        return found


def median(events: list[dict[str, Any]]) -> float:
    """Return the median time of the last steps."""
    return statistics.median(event["seconds"] for event in events[-MEASURED:])


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, action="append", help="Mbit/s; may be repeated")
    parser.add_argument("--step", type=float, action="append", help="seconds; may be repeated")
    parser.add_argument("--megabytes", type=float, default=1.3, help="of the fp32 gradient")
    parser.add_argument("--result", default="auto", help="name of the JSON file")
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report(options.result)
    for rate in options.rate or RATES:
        with ShapedNetwork(WORKERS, rate * 10**6) as network:
            for step in options.step or STEPS:
                measure(report, Cell(network, rate, step, options.megabytes))
    table(report)
    return report.write()


def measure(report: Report, cell: Cell) -> None:
    """Run a cell's codecs and report their ratios."""
    fixed = {codec: median(cell.events(WARM_UP + MEASURED, codec=codec)) for codec in FREE}
    events = cell.events(DECIDED + MEASURED, codec="auto")
    auto, best = median(events), min(fixed, key=lambda codec: fixed[codec])
    report.add(
        Ratio(f"{cell.name}, auto", auto / fixed[best], f"{best}'s step", TARGET),
        rate=cell.rate,
        step_seconds=cell.step,
        taken=events[-1]["codec"],
        best=best,
        seconds={**fixed, "auto": auto},
    )


def table(report: Report) -> None:
    """Print the seconds of all cells."""
    rows = [figures for figures in report.figures if "taken" in figures]
    print(f"\n{'Mbit/s':>6} {'step':>6} {'bf16':>8} {'int8':>8} {'auto':>8}  takes   best")
    for row in rows:
        each = " ".join(f"{1e3 * row['seconds'][key]:8.1f}" for key in (*FREE, "auto"))
        step, ends = 1e3 * row["step_seconds"], f"{row['taken']:7} {row['best']}"
        print(f"{row['rate']:6} {step:6.0f} {each}  {ends}")


if __name__ == "__main__":
    sys.exit(main())
