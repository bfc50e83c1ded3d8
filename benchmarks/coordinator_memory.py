"""The coordinator's memory: its peaks above the import baseline over the flat fp32 gradient.

    python benchmarks/coordinator_memory.py [--elements 5900000 --elements 33000000] [--steps 16]

A real coordinator, mutual TLS and three real workers on loopback, whose gradients are there at
once; then the same with the first in the order of addition late in every step, the worst case:
everything that the others send waits for it. Both runs include the joins, a checkpoint every few
steps (written in a thread) and a worker that is killed and rejoins.

Each step has a peak of its own (VmHWM, reset behind it). A ratio is the largest of the steps
without a transfer of the state: state 3, averages 1, and what waits. Beside it stand the peaks of
steps while a checkpoint was written, and while a worker joined. Memory that workers of
the host map too is counted apart, since a host has it once: what each uploads, and the averages.
JSON: benchmarks/results/coordinator_memory.json.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from itertools import product
from pathlib import Path

from rig.certificates import write_certificates
from rig.report import Ratio, Report, skip

from benchmarks.rig.cluster import LocalCluster, end_on_terminate
from benchmarks.rig.member import MemberSpec

WORKERS = 3
CHECKPOINT_EVERY = 4
VICTIM = 1
COST = 0.05
"""Seconds that each worker computes."""
LATE = 0.3
"""Seconds by which the first worker is slower than the others."""
GOAL = 4.0
_BEHIND = 2
"""Steps after a worker is in until one has ended that needed it: it has read everything then."""
PATIENCE = 120.0


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
    sizes, codecs = options.elements or [5_900_000, 33_000_000], options.codec or ["fp32", "bf16"]
    for elements, codec, shared_memory in product(sizes, codecs, (False, True)):
        for late in (0.0, LATE):
            measure(report, elements, codec, options.steps, shared_memory=shared_memory, late=late)
    return report.write()


def measure(
    report: Report, elements: int, codec: str, steps: int, *, shared_memory: bool, late: float
) -> None:
    """Run a cluster through all that costs memory and report the peaks."""
    with tempfile.TemporaryDirectory() as scratch, LocalCluster(patience=PATIENCE) as cluster:
        write_certificates(Path(scratch) / "tls", WORKERS, ["127.0.0.1"])
        spec = MemberSpec(
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
            cluster.start_worker(spec.as_worker(rank, port, COST + (0.0 if rank else late)))
        peaks = Peaks(4 * elements)
        for _, event in cluster.events(timeout=PATIENCE):
            peaks.note(event)
            if event["event"] == "step" and event["step"] == steps // 3:
                cluster.kill(f"worker {VICTIM}")
                cluster.start_worker(spec.as_worker(VICTIM, port, COST))
    what = "shared memory" if shared_memory else "TLS"
    when = "the first late" if late else "none late"
    report.add(
        Ratio(
            f"{elements / 1e6:g} M elements as {codec}, {WORKERS} workers over {what}, {when}, "
            "peak of the coordinator",
            peaks.of["step"],
            f"one gradient ({4 * elements / 1e6:.0f} MB)",
            GOAL,
        ),
        while_saving=round(peaks.of["save"], 3),
        while_joining=round(peaks.of["join"], 3),
        shared_with_workers=round(peaks.shared, 3),
        imports_bytes=peaks.imports,
        steps=dict(peaks.count),
    )


class Peaks:
    """The largest peaks of steps, in gradients, by what else went on."""

    def __init__(self, gradient: int) -> None:
        self._gradient = gradient
        self._joining: float = _BEHIND
        self._saving: set[int] = set()
        self._transfers: set[str] = {"join"}
        """What went on since the last step ended."""
        self.imports = 0
        self.shared = 0.0
        self.of: dict[str, float] = defaultdict(float)
        self.count: dict[str, int] = defaultdict(int)

    def note(self, event: dict[str, object]) -> None:
        """Take one event of the coordinator into account."""
        match event:
            case {"event": "lost"}:
                self._joining = math.inf
                self._transfers.add("join")
            case {"event": "joined" | "rejoined"}:
                self._joining = _BEHIND
            case {"event": "saved", "step": int(step)}:
                self._saving.discard(step)
            case {"event": "step", "step": int(step), "peak": int(peak), "shared": int(shared)}:
                kind = min(self._transfers, default="step")  # a join is the larger one
                self.of[kind] = max(self.of[kind], peak / self._gradient)
                self.count[kind] += 1
                self.imports = int(str(event["imports"]))
                self.shared = max(self.shared, shared / self._gradient)
                if step % CHECKPOINT_EVERY == 0:
                    self._saving.add(step)
                self._transfers = {"join"} if self._joining > 0 else set()
                self._joining -= 1
                if self._saving:
                    self._transfers.add("save")
            case _:
                pass


if __name__ == "__main__":
    sys.exit(main())
