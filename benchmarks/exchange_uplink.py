"""A worker on a remote host: bytes on its interface against the codec's formula.

    python benchmarks/exchange_uplink.py [--megabytes 5.3] [--codec fp32] [--rate 1000] [--steps 40]

The coordinator and the worker run in two network namespaces, as real processes with mutual TLS.
Counted are the bytes that the remote host sends and receives in so many steps, with the headers of
every packet, acknowledgements and heartbeats. It is counted while the worker waits before it sends,
and not after the last step, which is settled, and so in bf16 with a lossy codec. Needs root.
JSON: benchmarks/results/exchange_uplink.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from exchange import CODECS, USUAL, elements_of, encoded_bytes
from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec
from benchmarks.rig.network import ShapedNetwork, missing

WARM_UP = 5
REST = 2
"""Steps that are not counted at the end: the one that it waits in, and the last."""
OVERHEAD = 1.06
NEAR, FAR = 0, 1
"""The coordinator's host, and the worker's."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s")
    parser.add_argument("--megabytes", type=float, default=5.3, help="of the fp32 gradient")
    parser.add_argument("--codec", choices=CODECS, action="append")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--result", default="exchange_uplink", help="name of the JSON file")
    options = parser.parse_args()
    end_on_terminate()
    if reason := missing():
        skip(reason)
    report = Report(options.result)
    with (
        ShapedNetwork(2, options.rate * 10**6) as network,
        tempfile.TemporaryDirectory() as scratch,
    ):
        write_certificates(Path(scratch), 1, [network.address(NEAR), network.address(FAR)])
        for codec in options.codec or list(USUAL):
            spec = MemberSpec(
                role="worker",
                elements=elements_of(options.megabytes),
                workers=1,
                batch=2,
                steps=WARM_UP + options.steps + REST,
                gated=WARM_UP + options.steps + 1,
                address=(network.address(NEAR), 0),
                tls=scratch,
                settings={"exchange.codec": codec, "exchange.shares": "equal"},
            )
            found = traffic(network, spec)
            for what, bytes_ in zip(("sent", "received"), found, strict=True):
                report.add(
                    Ratio(
                        f"{codec}, one worker, bytes {what}",
                        bytes_ / due(spec, codec),
                        "the codec's formula",
                        target=OVERHEAD,
                    ),
                    bytes_a_step=round(bytes_ / options.steps),
                )
    return report.write()


def due(spec: MemberSpec, codec: str) -> int:
    """Return the bytes of the gradients of all steps that are counted."""
    return (spec.steps - WARM_UP - REST) * encoded_bytes(codec, spec.elements)


def traffic(network: ShapedNetwork, spec: MemberSpec) -> tuple[int, int]:
    """Return the bytes that the remote host sent and received, of all steps that are counted."""
    before, done = (0, 0), 0
    with LocalCluster() as cluster:
        port = cluster.start_coordinator(spec.as_coordinator(), network.inside(NEAR))
        cluster.start_worker(spec.as_worker(0, port), network.inside(FAR))
        for _, event in cluster.events(timeout=120):
            if event["event"] != "ready":
                continue
            if done == WARM_UP:
                before = network.counted(FAR)
            elif done == spec.gated - 1:
                break
            cluster.tell("worker 0", "go")
            done += 1
        after = network.counted(FAR)
    return after[0] - before[0], after[1] - before[1]


if __name__ == "__main__":
    sys.exit(main())
