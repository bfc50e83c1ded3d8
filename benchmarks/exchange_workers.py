"""Many workers on the coordinator's host: bytes a second through one coordinator.

    python benchmarks/exchange_workers.py [--workers 1 --workers 16] [--megabytes 5.3] [--steps 20]

Real processes on loopback, without TLS, once with shared memory and once over TCP. Each step every
worker hands over a gradient and gets the average back; what counts is the sum over all workers, in
and out, over the time from the first block that any worker hands over to the last average that
reaches the slowest. The workers share the processors with the coordinator and do not compute.
JSON: benchmarks/results/exchange_workers.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from exchange import FREE, REST, WARM_UP, elements_of, span
from rig.report import Ratio, Report

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec

WORKERS = (1, 2, 4, 8, 16)
TARGET_WORKERS = 16
TARGET = 1500.0
"""MB/s that many workers are to reach."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, action="append")
    parser.add_argument("--megabytes", type=float, default=5.3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    end_on_terminate()
    report = Report("exchange_workers")
    for workers in options.workers or WORKERS:
        for shared_memory in (True, False):
            measure(report, workers, options.megabytes, options.steps, shared_memory=shared_memory)
    return report.write()


def measure(
    report: Report, workers: int, megabytes: float, steps: int, *, shared_memory: bool
) -> None:
    """Run one number of workers over one transport and report its MB/s."""
    spec = MemberSpec(
        role="worker",
        elements=elements_of(megabytes),
        workers=workers,
        batch=workers,
        steps=WARM_UP + steps + FREE,
        address=("127.0.0.1", 0),
        settings={"exchange.shares": "equal", "exchange.shared_memory": shared_memory},
        gated=WARM_UP + steps,
        rest=REST,
    )
    with LocalCluster() as cluster:
        port = cluster.start_coordinator(spec.as_coordinator())
        for rank in range(workers):
            cluster.start_worker(spec.as_worker(rank, port))
        together, _ = cluster.run_gated(workers)
    measured = together[WARM_UP : WARM_UP + steps]
    seconds = statistics.median(span(step, "last_average") for step in measured)
    moved = 2 * workers * 4 * spec.elements / 1e6
    transport = "shared memory" if shared_memory else "TCP"
    report.add(
        Ratio(
            f"{workers} workers, {megabytes:g} MB as fp32, {transport}",
            moved / seconds,
            "one MB/s, in and out",
            target=TARGET if shared_memory and workers == TARGET_WORKERS else None,
            better="higher",
        ),
        milliseconds=round(1e3 * seconds, 2),
    )


if __name__ == "__main__":
    sys.exit(main())
