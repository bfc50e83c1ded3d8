"""Planned and measured time of a step of the mixed exchange, after calibration, on slow links.

    python benchmarks/plan_exchange.py [--rate 50 --rate 200] [--steps 12]

A coordinator with one worker beside it and one on another host, in network namespaces, real
processes and mutual TLS; every link is shaped to the rate both ways. Workers sleep instead of
computing, so that other load hardly changes a step. Two runs calibrate: one with next to no
gradient gives the seconds of a step without its exchange, one without computing the bytes a second
of the link. Then `trainer.planning.exchange_choice` says how long steps of other gradients, codecs
and times take; a ratio is the greater of the planned and the measured median over the lesser. Needs
root. JSON: benchmarks/results/plan_exchange.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path

from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing
from benchmarks.rig.synthetic import BLOCKS
from trainer.planning.devices import LinkRates
from trainer.planning.exchange_choice import ExchangeLoad, element_bytes, exposed

WORKERS = 2
WARM_UP = 4
LEAST = BLOCKS * 64
"""Elements that take no time on the wire."""
MEGABYTES = 5.3
"""Of the fp32 gradient that calibrates the link, and of the larger one that is planned."""
WITHIN = 1.15


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, action="append", help="Mbit/s; may be repeated")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report("plan_exchange")
    for rate in options.rate or [50, 200]:
        with (
            ShapedNetwork(WORKERS, rate * 10**6) as network,
            tempfile.TemporaryDirectory() as scratch,
        ):
            names = [network.address(host) for host in range(WORKERS)]
            write_certificates(Path(scratch), WORKERS, names)
            compare(report, Bench(network, Path(scratch), options.steps), rate)
    return report.write()


def compare(report: Report, bench: Bench, rate: int) -> None:
    """Calibrate, then report planned against measured for each case."""
    whole = elements_of(MEGABYTES)
    empty = bench.step_seconds(LEAST, "fp32", 0.0)
    full = bench.step_seconds(whole, "fp32", 0.0)
    goodput = element_bytes("fp32") * whole / (full - empty)
    nominal = rate * 1e6 / 8
    wire = element_bytes("fp32") * whole / nominal
    for codec, megabytes, share in product(("fp32", "bf16"), (MEGABYTES, MEGABYTES / 2), (0.5, 2)):
        elements, cost = elements_of(megabytes), share * wire
        alone = empty + cost
        asked = ExchangeLoad(
            link=LinkRates(up=goodput, down=goodput),
            elements=elements,
            blocks=BLOCKS,
            step_seconds=alone,
            total_steps=10**6,
        )
        planned = alone + exposed(asked, codec).value
        measured = bench.step_seconds(elements, codec, cost)
        name = f"{rate} Mbit/s, {megabytes:g} MB as {codec}, computing {cost:.2f} s"
        report.add(
            Ratio(name, max(planned / measured, measured / planned), "the lesser", target=WITHIN),
            planned_ms=round(1e3 * planned, 1),
            measured_ms=round(1e3 * measured, 1),
            computing_ms=round(1e3 * cost, 1),
            without_exchange_ms=round(1e3 * empty, 1),
            goodput_of_rate=round(goodput / nominal, 3),
        )


class Bench:
    """A network of one rate."""

    def __init__(self, network: ShapedNetwork, certificates: Path, steps: int) -> None:
        self._network = network
        self._certificates = certificates
        self._steps = steps

    def step_seconds(self, elements: int, codec: str, cost: float) -> float:
        """Return the median seconds from commit to commit if each worker computes for `cost`."""
        spec = MemberSpec(
            role="worker",
            elements=elements,
            workers=WORKERS,
            batch=WORKERS,
            steps=WARM_UP + self._steps,
            address=(self._network.address(0), 0),
            tls=str(self._certificates),
            settings={"exchange.codec": codec, "exchange.shares": "equal"},
        )
        commits: list[float] = []
        with LocalCluster() as cluster:
            port = cluster.start_coordinator(spec.as_coordinator(), self._network.inside(0))
            for rank in range(WORKERS):
                worker = spec.as_worker(rank, port, cost)
                cluster.start_worker(worker, self._network.inside(rank))
            for _, event in cluster.events(timeout=120):
                if event.get("event") == "step":
                    commits.append(event["at"])
        return statistics.median(b - a for a, b in pairwise(commits[WARM_UP:]))


def elements_of(megabytes: float) -> int:
    """Return the elements of an fp32 gradient of that size, whole blocks of even size."""
    return BLOCKS * (int(megabytes * 1e6 / 4) // BLOCKS // 2 * 2)


if __name__ == "__main__":
    sys.exit(main())
