"""A ring of four: all-reduce time of one step over what the wire alone would need.

    python benchmarks/ring.py [--rate 200 --rate 1000] [--megabytes 5.3] [--steps 20] [--ranks 4]

Hosts in network namespaces, every link shaped to the rate both ways, a rank of gloo on each. The
gradient is summed twice: as one flat buffer, and as `exchange.topology: ring` does it, in the
buckets of the training's own DistributedDataParallel. Ranks start together and do not compute. A
ratio is the time from the first rank's start to the last one's end over the ring's limit
2 (n - 1) / n * S / B with the nominal rate: TCP/IP headers alone make it 1.046. Needs root. JSON:
benchmarks/results/ring.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import product

from rig.report import Ratio, Report, skip
from rig.ring_rank import BucketSpec

from benchmarks.rig import collective
from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.comparison import run_ranks
from benchmarks.rig.network import ShapedNetwork, missing
from trainer.config.exchange import FEWEST

WARM_UP = 3
"""Steps; DDP rebuilds its buckets after the first."""
TARGET = 1.05
TARGET_RATE = 200
KINDS: dict[str, type[collective.CollectiveSpec]] = {
    "one flat buffer": collective.CollectiveSpec,
    "DDP's buckets": BucketSpec,
}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, action="append", help="Mbit/s; may be repeated")
    parser.add_argument("--megabytes", type=float, action="append", help="of the fp32 gradient")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=FEWEST)
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report("ring")
    sizes: list[float] = options.megabytes or [5.3, 23.6]
    for rate in options.rate or [200, 1000]:
        with ShapedNetwork(options.ranks, rate * 10**6) as network:
            for megabytes, kind in product(sizes, KINDS):
                measure(report, network, options.ranks, rate, megabytes, kind, options.steps)
    return report.write()


def measure(
    report: Report,
    network: ShapedNetwork,
    ranks: int,
    rate: int,
    megabytes: float,
    kind: str,
    steps: int,
) -> None:
    """Sum so many times and report the median's ratio."""
    elements = round(megabytes * 1e6 / 4) // 72 * 72  # whole layers of `synthetic.layout`
    with LocalCluster(patience=300.0) as cluster, tempfile.TemporaryDirectory() as results:
        spec = KINDS[kind](
            kind="gloo",
            world=ranks,
            address=f"{network.address(0)}:29611",
            interface="eth0",
            model="",
            elements=elements,
            steps=WARM_UP + steps,
            batch=ranks,
            results=results,
            trains=False,
        )
        found = run_ranks(cluster, spec, [network.inside(rank) for rank in range(ranks)])
    assert all(rank.get("right", True) for rank in found), "a rank has other sums"
    together = list(zip(*(rank["stamps"] for rank in found), strict=True))[WARM_UP:]
    seconds = statistics.median(
        max(rank["last_average"] for rank in step) - min(rank["first_send"] for rank in step)
        for step in together
    )
    limit = 2 * (ranks - 1) / ranks * elements * 4 * 8 / (rate * 1e6)
    report.add(
        Ratio(
            f"{rate} Mbit/s, {megabytes:g} MB, ring of {ranks}, {kind}",
            seconds / limit,
            f"its limit ({1e3 * limit:.1f} ms)",
            target=TARGET if rate == TARGET_RATE else None,
        ),
        milliseconds=round(1e3 * seconds, 2),
        limit_milliseconds=round(1e3 * limit, 2),
    )


if __name__ == "__main__":
    sys.exit(main())
