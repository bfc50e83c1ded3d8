"""Strangers: a run of three workers beside thousands of connections that never join.

    python benchmarks/strangers.py [--connections 5000] [--rate 250] [--spell 10]

A real coordinator with mutual TLS and three workers on loopback. Quiet spells alternate with parts
of the strangers: `--rate` a second, half of them silent and half with the first record of a
handshake, each held until the coordinator closes it, none ever finishes. All come from the workers'
own address. Reported: the median step beside strangers over that of the quiet spells around; the
coordinator's peak memory over its memory before them, and in the last part over the first; lines of
the log for a thousand strangers. JSON: benchmarks/results/strangers.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rig.certificates import write_certificates
from rig.crowd import Crowd, resident
from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import COORDINATOR, LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec

WORKERS = 3
ELEMENTS = 100_000
COST = 0.02
"""Seconds a sample; a step is two samples of each worker, and the exchange."""
WARM_UP = 5.0
STEPS = 1_000_000
SLOWER = 1.1
LARGER = 1.25
FLAT = 1.05
LINES = 10


@dataclass
class Spell:
    """Measurements while the run was alone, or while strangers connected."""

    strangers: int = 0
    steps: list[float] = field(default_factory=list[float])
    memory: int = 0
    lines: int = 0
    bytes: int = 0


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, default=5000, help="of each kind")
    parser.add_argument("--rate", type=float, default=250.0, help="connections a second")
    parser.add_argument("--spell", type=float, default=10.0, help="seconds alone between two parts")
    parser.add_argument("--parts", type=int, default=4, help="in which the strangers come")
    parser.add_argument("--result", default="strangers", help="name of the JSON file")
    options = parser.parse_args()
    end_on_terminate()
    if not Path("/proc/self/statm").exists():
        skip("needs Linux: memory is read from /proc")
    report = Report(options.result)
    alone: list[Spell] = []
    beside: list[Spell] = []
    with tempfile.TemporaryDirectory() as scratch, LocalCluster() as cluster:
        port = start(cluster, Path(scratch))
        watch(cluster, Spell(), WARM_UP)
        share = 2 * options.connections // options.parts
        for _ in range(options.parts):
            alone.append(watch(cluster, Spell(), options.spell))
            crowd = Crowd(
                port, count=share, rate=options.rate, held=200, kinds=["idle", "half-TLS"]
            )
            with crowd:
                beside.append(watch(cluster, Spell(), 20 * share / options.rate, crowd))
        alone.append(watch(cluster, Spell(), options.spell))
    quiet = [step for spell in alone for step in spell.steps]
    crowded = [step for spell in beside for step in spell.steps]
    count = sum(spell.strangers for spell in beside)
    lines = sum(spell.lines for spell in beside)
    figures = {
        "strangers": count,
        "steps_alone": len(quiet),
        "steps_beside": len(crowded),
        "median_ms_alone": round(1e3 * statistics.median(quiet), 2),
        "median_ms_beside": round(1e3 * statistics.median(crowded), 2),
        "memory_alone": [spell.memory for spell in alone],
        "memory_beside": [spell.memory for spell in beside],
        "lines": lines,
        "bytes_of_lines": sum(spell.bytes for spell in beside),
    }
    name = f"{count} strangers, half of them in a handshake"
    report.add(
        Ratio(
            f"{name}: median step",
            statistics.median(crowded) / statistics.median(quiet),
            "the median step alone",
            SLOWER,
        ),
        **figures,
    )
    last, before = max(spell.memory for spell in beside), alone[0].memory
    memory = f"{name}: memory of the coordinator"
    report.add(Ratio(memory, last / before, "what it held before them", LARGER))
    report.add(
        Ratio(memory, beside[-1].memory / beside[0].memory, "that after the first part", FLAT)
    )
    report.add(
        Ratio(f"{name}: lines of the log", 1000 * lines / count, "a line each thousand", LINES)
    )
    return report.write()


def start(cluster: LocalCluster, scratch: Path) -> int:
    """Start the members and return the coordinator's port."""
    write_certificates(scratch / "tls", WORKERS, ["127.0.0.1"])
    spec = MemberSpec(
        role="worker",
        elements=ELEMENTS,
        workers=WORKERS,
        steps=STEPS,
        address=("127.0.0.1", 0),
        batch=2 * WORKERS,
        tls=str(scratch / "tls"),
        settings={"exchange.shares": "equal", "checkpoint.every": 100},
        checkpoints=str(scratch / "checkpoints"),
    )
    port = cluster.start_coordinator(spec.as_coordinator())
    for rank in range(WORKERS):
        cluster.start_worker(spec.as_worker(rank, port, cost=COST))
    return port


def watch(cluster: LocalCluster, spell: Spell, seconds: float, crowd: Crowd | None = None) -> Spell:
    """Measure for `seconds`, or until the crowd has connected."""
    pid = cluster.pid(COORDINATOR)
    end = time.monotonic() + seconds
    for _, event in cluster.events(timeout=60):
        if event["event"] == "lost":
            raise RuntimeError(f"a worker was lost: {event['reason']}")
        if event["event"] == "step":
            spell.steps.append(event["seconds"])
            spell.memory = max(spell.memory, resident(pid))
        elif event["event"] == "refused":
            spell.lines += 1
            spell.bytes += len(json.dumps(event))
        if (crowd and crowd.done.is_set()) or time.monotonic() > end:
            break
    if crowd:
        spell.strangers = crowd.opened
    return spell


if __name__ == "__main__":
    sys.exit(main())
