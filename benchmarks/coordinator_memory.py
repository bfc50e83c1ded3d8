"""The coordinator's memory: its peak above the import baseline over the flat fp32 gradient.

    python benchmarks/coordinator_memory.py [--elements 5900000 --elements 33000000] [--steps 16]

A real coordinator, mutual TLS and three real workers on loopback. Two do not compute and the first
in the order of addition is late in every step, which is the worst case: everything that the others
send waits for it. The run includes the joins, a checkpoint every few steps (written in a thread)
and a worker that is killed during the run and rejoins. The peak is the kernel's count (VmHWM, reset
after the imports); the target is (workers + 4) gradients. Over shared memory it counts
the workers' regions too, which a host has once, and which hold what waits elsewhere over TLS.
JSON: benchmarks/results/coordinator_memory.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from trainer.lab.compare.cluster import Cluster, end_on_terminate
from trainer.lab.compare.member import Spec

WORKERS = 3
CHECKPOINT_EVERY = 4
VICTIM = 1
LATE = 0.3
"""Seconds by which the first worker is slower than the others."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, action="append")
    parser.add_argument("--codec", choices=("fp32", "bf16"), action="append")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    end_on_terminate()
    if not Path("/proc/self/clear_refs").exists():
        skip("needs Linux: the peak is read from /proc")
    report = Report("coordinator_memory")
    for elements in options.elements or [5_900_000, 33_000_000]:
        for codec in options.codec or ["fp32", "bf16"]:
            for shared_memory in (False, True):
                measure(report, elements, codec, options.steps, shared_memory=shared_memory)
    return report.write()


def measure(report: Report, elements: int, codec: str, steps: int, *, shared_memory: bool) -> None:
    """Run a cluster through all that costs memory and report the peak."""
    memory: dict[str, int] = {}
    seen: list[str] = []
    with tempfile.TemporaryDirectory() as scratch, Cluster() as cluster:
        write_certificates(Path(scratch) / "tls", WORKERS, ["127.0.0.1"])
        spec = Spec(
            role="worker",
            elements=elements,
            workers=WORKERS,
            steps=steps,
            address=("127.0.0.1", 0),
            tls=str(Path(scratch) / "tls"),
            settings={
                "exchange.codec": codec,
                "checkpoint.every": CHECKPOINT_EVERY,
                "exchange.shares": "equal",
                "exchange.shared_memory": shared_memory,
            },
            checkpoints=str(Path(scratch) / "checkpoints"),
        )
        port = cluster.start_coordinator(spec.as_coordinator())
        for rank in range(WORKERS):
            cluster.start_worker(spec.as_worker(rank, port, cost=0.0 if rank else LATE))
        for _, event in cluster.events(timeout=120):
            kind = event["event"]
            if kind in ("joined", "rejoined", "lost", "saved"):
                seen.append(kind)
            if kind == "memory":
                memory = event
            elif kind == "step" and event["step"] == steps // 3:
                cluster.kill(f"worker {VICTIM}")
                cluster.start_worker(spec.as_worker(VICTIM, port))
    gradient = 4 * elements
    peak = memory["peak"] - memory["before"]
    report.add(
        Ratio(
            f"{elements / 1e6:g} M elements as {codec}, {WORKERS} workers over "
            f"{'shared memory' if shared_memory else 'TLS'}, peak of the coordinator",
            peak / gradient,
            f"one gradient ({gradient / 1e6:.0f} MB)",
            None if shared_memory else WORKERS + 4,
        ),
        import_baseline_bytes=memory["before"],
        peak_bytes=memory["peak"],
        shared_with_workers_bytes=memory["shared"],
        events={kind: seen.count(kind) for kind in sorted(set(seen))},
    )


if __name__ == "__main__":
    sys.exit(main())
