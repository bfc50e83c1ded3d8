"""One model on two processes: each strategy against plain PyTorch, memory, overlap, inference.

    python benchmarks/parallel.py [--parts steps memory files overlap generate] [--rounds 15]

Two processes with one thread each and gloo between them train one small Llama, all weights.
`steps`: forward, backward and every reduction of a step, beside the same strategy by hand
(benchmarks/rig/plain.py, plain_pipeline.py) and by `accelerate` (DDP and FSDP2, skipped where it is
not installed), one step of each in turn. A step takes as long as its slowest rank; the ratio is
the median of the rounds' own, since load changes from round to round, and `of_processor_time` that
of the busier rank's processor time, which other load changes less. Losses are compared first.
`memory`: the most bytes that torch's allocator holds on a rank from the loading of the model to the
end of a step, against the plan; of a replica group's process, resident memory.
`files`: resident memory of rank 0 above that before, while it loads a model, and while the ranks'
state is written at the end of a run with sharded checkpoints (`save` gathers all of it first), and
while they resume.
`overlap`: when DDP reduces each bucket, and how much of that is hidden behind backward.
`generate`: tokens a second of two processes (tensor=2) against one, over the model's width.
JSON: benchmarks/results/parallel-PART.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rig.parallel_files import report_files, weigh_files
from rig.parallel_generation import report_generation, time_generation
from rig.parallel_memory import report_memory, weigh
from rig.parallel_models import RANKS, ROWS, encoded, meshes, ours, rows, write_model
from rig.parallel_steps import report_steps, time_steps
from rig.ranks import ALONE, Ranks
from rig.report import Ratio, Report, skip
from rig.resident import EXACT

PARTS = ("steps", "memory", "files", "overlap", "generate")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < RANKS:
        skip(f"{RANKS} processes need a processor each")
    missed = 0
    for part in options.parts:
        report = Report(f"parallel-{part}")
        found = measure(part, options.rounds)
        REPORTS[part](report, found)
        missed |= report.write()
    return missed


def measure(part: str, rounds: int) -> list[Any]:
    """Return what each rank found."""
    with (
        tempfile.TemporaryDirectory(prefix="motley-parallel-") as scratch,
        Ranks(RANKS, EXACT | ALONE) as ranks,
    ):
        return ranks.run_all(work, part, Path(scratch), rounds)


def work(_rank: int, part: str, folder: Path, rounds: int) -> Any:
    """Measure as one of the processes, and return what was found, as JSON has it."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = json.loads(json.dumps(WORK[part](folder, rounds)))
    dist.barrier()
    return found


def trace_buckets(folder: Path, rounds: int) -> list[Any]:
    """Return, for each step, when backward ran and when each bucket was reduced."""
    import torch.distributed as dist

    path = write_model(folder, hidden_size=768, head_dim=128, intermediate_size=2048)
    replica = ours(path, "ddp", meshes()["ddp"])
    share = replica.share(ROWS)
    batch = encoded(rows()[share.start : share.stop])
    buckets: list[dict[str, float]] = []

    def hook(_: None, bucket: Any) -> Any:
        buffer = bucket.buffer().div_(RANKS)
        entry = {"megabytes": buffer.nbytes / 1e6, "start": time.perf_counter()}
        buckets.append(entry)

        def done(future: Any) -> Any:
            entry["stop"] = time.perf_counter()
            return future.value()[0]

        work: Any = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(done)

    hook.__annotations__.clear()  # torch reads them as types; here they are text
    replica._module.register_comm_hook(None, hook)  # what DDP does without one, and the times
    steps: list[Any] = []
    for _ in range(rounds + 1):
        buckets.clear()
        dist.barrier()
        began = time.perf_counter()
        replica.accumulate(batch)
        steps.append({"begin": began, "end": time.perf_counter(), "buckets": list(buckets)})
    return steps[1:]


def report_overlap(report: Report, ranks: list[Any]) -> None:
    """Report how much of the reductions is hidden behind backward."""
    shares: list[float] = []
    for step in ranks[0]:
        computed = max(bucket["start"] for bucket in step["buckets"])  # the last gradient is there
        busy = sum(bucket["stop"] - bucket["start"] for bucket in step["buckets"])
        hidden = sum(
            max(0.0, min(bucket["stop"], computed) - bucket["start"]) for bucket in step["buckets"]
        )
        shares.append(hidden / busy)
    report.add(
        Ratio(
            "ddp: hidden behind backward",
            statistics.median(shares),
            "the time of the all-reduces, summed over buckets",
        ),
        every_step=[round(share, 3) for share in shares],
    )


WORK = {
    "steps": time_steps,
    "memory": weigh,
    "files": weigh_files,
    "overlap": trace_buckets,
    "generate": time_generation,
}
REPORTS = {
    "steps": report_steps,
    "memory": report_memory,
    "files": report_files,
    "overlap": report_overlap,
    "generate": report_generation,
}


if __name__ == "__main__":
    sys.exit(main())
