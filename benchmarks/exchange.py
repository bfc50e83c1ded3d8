"""The exchange: all-reduce time of one step over what the wire alone would need.

    python benchmarks/exchange.py [--rate 200 --rate 1000] [--megabytes 5.3] [--steps 20] [--busy]

Three hosts in network namespaces, every link shaped to the rate both ways; real processes, mutual
TLS. Four placements: the coordinator beside two workers and one remote worker, beside one worker
and two remote ones on two hosts or on one, and alone with one remote worker, which leaves each a
core where there are two.
Measured from the first block that any worker hands over to the last average that reaches the
slowest worker; the workers start together and do not compute.

A ratio is that time over the limit of a pipelined star, max(S / B_worker, remote workers * S /
B_coordinator), with S the encoded gradient and B the nominal rate of the links: TCP/IP headers
alone make it 1.046 (1,448 of 1,514 bytes). gloo's ring runs beside it on the same hosts, over its
own limit 2 (H - 1) / H * S / B. `--busy` runs an endless loop beside it on each processor. The
coordinator's processor time is told per gigabyte that crosses its remote links, in and out, with
all that it does (sums, checks, its own update). Needs root. JSON: benchmarks/results/exchange.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

from rig.report import Ratio, Report, skip

from benchmarks.rig import collective, synthetic
from benchmarks.rig.cluster import COORDINATOR, LocalCluster, end_on_terminate
from benchmarks.rig.comparison import run_ranks
from benchmarks.rig.member import MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing
from launcher.runs.certificates.authority import Authority, certificate_identity
from trainer.config.codec import CODECS
from trainer.exchange.protocol.codecs import make_codec

HOSTS = 3
WORKERS = 3
WARM_UP = 3
FREE = 6
"""Steps at the end without a common start, for the time from commit to commit."""
REST = 0.05
"""Seconds between steps with a common start: everyone, the coordinator too, has applied."""
TARGET = 1.15
TARGET_RATE = 200
USUAL = ("fp32", "bf16")
PLACEMENTS = {
    "2 local + 1 remote": (0, 0, 1),
    "1 local + 2 remote": (0, 1, 2),
    "1 local + 2 on one remote": (0, 1, 1),
    "1 remote": (1,),
}
"""The host of each worker; the coordinator is on host 0."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, action="append", help="Mbit/s; may be repeated")
    parser.add_argument("--megabytes", type=float, action="append", help="of the fp32 gradient")
    parser.add_argument("--codec", choices=CODECS, action="append")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--busy", action="store_true", help="a busy loop beside it on each core")
    parser.add_argument("--no-ring", action="store_true")
    parser.add_argument("--no-plaintext", action="store_true")
    parser.add_argument("--result", default="exchange", help="name of the JSON file")
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report(options.result)
    sizes: list[float] = options.megabytes or [5.3, 23.6]
    codecs: list[str] = options.codec or list(USUAL)
    for rate in options.rate or [200, 1000]:
        with (
            ShapedNetwork(HOSTS, rate * 10**6) as network,
            tempfile.TemporaryDirectory() as scratch,
            busy_loops(os.cpu_count() or 1 if options.busy else 0),
        ):
            folder = Path(scratch)
            names = [network.address(host) for host in range(HOSTS)]
            write_certificates(folder, WORKERS, names)
            for megabytes, codec in product(sizes, codecs):
                for placement in options.placement or PLACEMENTS:
                    bench = Star(network, rate, megabytes, codec, placement, options.steps)
                    encrypted = bench.measure(report, folder)
                    if (megabytes, codec) == (sizes[0], codecs[0]) and not options.no_plaintext:
                        plain = bench.measure(report, None)
                        name = f"{bench.name}, time with TLS"
                        report.add(Ratio(name, encrypted / plain, "the time without"))
                if not options.no_ring and codec in USUAL:
                    measure_ring(report, network, rate, megabytes, codec, options.steps)
    return report.write()


class Star:
    """One size, codec and placement on a network of one rate."""

    def __init__(
        self,
        network: ShapedNetwork,
        rate: int,
        megabytes: float,
        codec: str,
        placement: str,
        steps: int,
    ) -> None:
        self.name = f"{rate} Mbit/s, {megabytes:g} MB as {codec}, {placement}"
        self._network = network
        self._rate = rate
        self._codec = codec
        self._hosts = PLACEMENTS[placement]
        self._steps = steps
        self._spec = MemberSpec(
            role="worker",
            elements=elements_of(megabytes),
            workers=len(self._hosts),
            steps=WARM_UP + steps + FREE,
            address=(network.address(0), 0),
            settings={"exchange.codec": codec, "exchange.split": "equal"},
            gated=WARM_UP + steps,
            rest=REST,
        )

    @property
    def limit(self) -> float:
        """The seconds that the wire needs when the star is pipelined."""
        remote = sum(host != 0 for host in self._hosts)
        bits = 8 * encoded_bytes(self._codec, self._spec.elements)
        return max(1, remote) * bits / (self._rate * 1e6)

    @property
    def remote_gigabytes(self) -> float:
        """The gigabytes of a step that cross the coordinator's remote links, in and out."""
        remote = sum(host != 0 for host in self._hosts)
        return 2 * remote * encoded_bytes(self._codec, self._spec.elements) / 1e9

    def measure(self, report: Report, certificates: Path | None) -> float:
        """Run all steps once, report the ratio, and return the median seconds."""
        spec = replace(self._spec, tls=str(certificates) if certificates else None)
        with LocalCluster() as cluster:
            inside = self._network.inside(0)
            port = cluster.start_coordinator(spec.as_coordinator(), inside)
            for rank, host in enumerate(self._hosts):
                cluster.start_worker(spec.as_worker(rank, port), self._network.inside(host))
            together, coordinator = cluster.run_gated(len(self._hosts))
        measured = together[WARM_UP : WARM_UP + self._steps]
        seconds = sorted(span(step, "last_average") for step in measured)
        commits = [max(worker["committed"] for worker in step) for step in together[-FREE:]]
        free = statistics.median(b - a for a, b in pairwise(commits))
        median = statistics.median(seconds)
        own = cpu_a_step(coordinator)
        of_workers = zip(*together, strict=True)
        all_of_them = own + sum(cpu_a_step([step["cpu"] for step in of]) for of in of_workers)
        wanted = self._rate == TARGET_RATE and certificates is not None
        report.add(
            Ratio(
                f"{self.name}, {'TLS' if certificates else 'plaintext'}",
                median / self.limit,
                f"the wire's limit ({1e3 * self.limit:.1f} ms)",
                target=TARGET if wanted else None,
            ),
            milliseconds=round(1e3 * median, 2),
            tenth=round(1e3 * seconds[len(seconds) // 10], 2),
            ninetieth=round(1e3 * seconds[len(seconds) * 9 // 10], 2),
            limit_milliseconds=round(1e3 * self.limit, 2),
            until_commit_milliseconds=round(
                1e3 * statistics.median(span(step, "committed") for step in measured), 2
            ),
            commit_to_commit_milliseconds=round(1e3 * free, 2),
            coordinator_cpu_milliseconds=round(1e3 * own, 2),
            coordinator_cpu_seconds_a_remote_gigabyte=round(own / self.remote_gigabytes, 2),
            all_cpu_milliseconds=round(1e3 * all_of_them, 2),
            bucket_bytes=self._network.bucket,
        )
        return median


def write_certificates(folder: Path, workers: int, names: Sequence[str]) -> None:
    """Make a CA and a folder of certificates for the coordinator and every rank."""
    authority = Authority.create()
    roles = {COORDINATOR: certificate_identity(synthetic.RUN_ID, None)}
    roles |= {
        f"rank-{rank}": certificate_identity(synthetic.RUN_ID, rank) for rank in range(workers)
    }
    for role, identity in roles.items():
        target = folder / role
        target.mkdir(parents=True)
        for name, content in authority.issue(identity, names).contents_by_name().items():
            (target / name).write_bytes(content)


def encoded_bytes(codec: str, elements: int) -> int:
    """Return the bytes of one encoded gradient, by the codec's formula."""
    made = make_codec(codec)
    return sum(made.encoded_size(block.size) for block in synthetic.layout(elements).blocks)


def span(step: list[dict[str, float]], until: str) -> float:
    """Return the seconds from the first worker's start to the last one's `until`."""
    return max(w[until] for w in step) - min(w["first_send"] for w in step)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep processors busy with endless loops that end with this process."""
    code = "import threading, sys, os\n" + (
        "threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()\n"
        "while True: pass"
    )
    loops = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(count)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.communicate()


def cpu_a_step(readings: list[float]) -> float:
    """Return the median of the processor seconds between two of the measured steps."""
    measured = readings[WARM_UP:-FREE]
    return statistics.median(after - before for before, after in pairwise(measured))


def measure_ring(
    report: Report, network: ShapedNetwork, rate: int, megabytes: float, codec: str, steps: int
) -> None:
    """Run gloo's ring on all hosts and report its ratio."""
    try:
        import torch.distributed  # noqa: F401 - only to know whether it is there
    except ImportError:
        print("gloo's ring: skipped: no torch here")
        return
    elements = elements_of(megabytes)
    with LocalCluster() as cluster, tempfile.TemporaryDirectory() as results:
        spec = collective.CollectiveSpec(
            kind="gloo",
            world=HOSTS,
            address=f"{network.address(0)}:29611",
            interface="eth0",
            model="",
            elements=elements,
            steps=WARM_UP + steps,
            batch=HOSTS,
            results=results,
            trains=False,
            codec="bf16" if codec == "bf16" else "fp32",
        )
        found = run_ranks(cluster, spec, [network.inside(rank) for rank in range(HOSTS)])
    together = list(zip(*(rank["stamps"] for rank in found), strict=True))[WARM_UP:]
    median = statistics.median(span(list(step), "last_average") for step in together)
    limit = 2 * (HOSTS - 1) / HOSTS * encoded_bytes(codec, elements) * 8 / (rate * 1e6)
    report.add(
        Ratio(
            f"{rate} Mbit/s, {megabytes:g} MB as {codec}, gloo's ring on {HOSTS} hosts",
            median / limit,
            f"its limit ({1e3 * limit:.1f} ms)",
        ),
        milliseconds=round(1e3 * median, 2),
        limit_milliseconds=round(1e3 * limit, 2),
    )


def elements_of(megabytes: float) -> int:
    """Return the elements of an fp32 gradient of that size, whole blocks of even size."""
    per_block = int(megabytes * 1e6 / 4) // 72 * 2
    return 36 * per_block


if __name__ == "__main__":
    sys.exit(main())
