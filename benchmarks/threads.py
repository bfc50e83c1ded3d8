"""Training on the CPU beside other work: tokens a second against the free processors' capacity.

    python benchmarks/threads.py [--seconds 8]

One to three workers, each in a process that chooses its threads, beside none to as many busy loops
as there are processors. They are compared with the capacity of the processors that the loops leave
(at least a fair share of all): one worker with one thread alone, times the processors, or one
worker alone with as many fixed threads as there are processors for each. The model has the demo's
shape, too small for two threads to be twice as fast as one. `fixed` is the same with torch's
default number of threads, for comparison.
JSON: benchmarks/results/threads.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rig.report import Ratio, Report

TARGET = 0.8
WORKER = ["--worker"]
BUSY = [sys.executable, "-c", "import os\nwhile os.getppid() != 1: pass"]  # ends with this process
SAMPLES, LENGTHS = 32, (20, 120)
WARM_UP = 3.0
"""Seconds before the measurement: caches, and two readings of the usage."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "THREADS", "SECONDS"))
    options = parser.parse_args()
    if options.worker:
        model, threads, seconds = options.worker
        print(work(Path(model), int(threads), float(seconds)))
        return 0
    report = Report("threads")
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="motley-threads-") as scratch:
        model = prepare(Path(scratch))
        alone = {
            threads: statistics.median(
                measure(model, 1, busy=0, threads=threads, seconds=options.seconds, most=cores)
                for _ in range(3)
            )
            for threads in range(1, cores + 1)
        }
        for threads, speed in alone.items():
            print(f"one worker alone, {threads} threads: {speed:.0f} tokens/s", flush=True)
        for busy in range(cores + 1):
            for workers in (1, 2, 3):
                left = max(cores - busy, cores * workers / (workers + busy))
                each = int(left / workers)
                possible = workers * alone[each] if each > 1 else min(left, workers) * alone[1]
                found = {
                    name: measure(model, workers, busy, threads, options.seconds, cores)
                    for name, threads in (("chosen", 0), ("fixed", -1))
                }
                report.add(
                    Ratio(
                        f"{workers} workers beside {busy} busy loops",
                        found["chosen"] / possible,
                        "what the free processors could do",
                        TARGET,
                        "higher",
                    ),
                    tokens_per_second={name: round(speed) for name, speed in found.items()},
                    possible=round(possible),
                    free_processors=round(left, 2),
                )
                print(f"  fixed: {found['fixed'] / possible:.3f}", flush=True)
    return report.write()


def prepare(folder: Path) -> Path:
    """Make a model of the demo's shape."""
    trainer = str(Path(sys.executable).parent / "trainer")
    data, model = folder / "data", folder / "model"
    for words in (
        ["generate-data", "shell-safety", "-o", str(data), "--count", "2000"],
        ["init-model", "--data", str(data / "train.jsonl"), "-o", str(model)],
    ):
        subprocess.run([trainer, *words], check=True, stdout=subprocess.DEVNULL)
    return model


def measure(model: Path, workers: int, busy: int, threads: int, seconds: float, most: int) -> float:
    """Return tokens a second of all workers together.

    Args:
        threads: of each worker; 0: its own choice, -1: as many as it could choose.
        most: the processors that the workers share.
    """
    share = max(1, most // workers)
    words = [str(model), str(share if threads == -1 else threads), str(seconds)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(share)}
    loops = [subprocess.Popen(BUSY) for _ in range(busy)]
    try:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *WORKER, *words],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(workers)
        ]
        return sum(float(process.communicate()[0]) for process in running)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def work(model: Path, threads: int, seconds: float) -> float:
    """Train on random samples and return tokens a second."""
    import numpy as np

    from trainer.config.run import load
    from trainer.data.tokens import Encoded
    from trainer.model.layout import build_layout
    from trainer.replica.torch.replica import TorchReplica

    config = load("quickstart", {"model.path": str(model)})
    layout = build_layout(model, config)
    replica = TorchReplica(model, config, layout, threads=threads or None)
    draw = np.random.default_rng(0)
    replica.write_trainable(draw.normal(0, 0.02, layout.size).astype(np.float32))
    batch = [
        Encoded(draw.integers(0, 500, length).astype(np.int32), 1)
        for length in draw.integers(*LENGTHS, SAMPLES)
    ]
    began, tokens = time.monotonic(), 0
    while (now := time.monotonic()) < began + WARM_UP + seconds:
        done = replica.forward_backward(batch, lambda *_: None)
        if now >= began + WARM_UP:
            tokens += done.tokens
    return tokens / seconds


if __name__ == "__main__":
    sys.exit(main())
