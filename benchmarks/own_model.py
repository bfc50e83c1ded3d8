"""A script's step under Motley over that of a plain PyTorch loop: one worker, one process.

    python benchmarks/own_model.py [--steps 30] [--rounds 5]

Both call the same script's functions on the same data, on the CPU with one thread: forward,
backward, clipping, AdamW (torch's own in the loop) and reading the loss. They take turns: a round
is a run of each, and a ratio that of the medians of their steps, without the first two. A step is
the processor time of the process, all its threads, from one call of `loss` to the next, which other
programs on the machine change least; elapsed time is printed, too. The figure is the median
ratio of the rounds. Two models: a convolution with a small step, and a transformer whose weights
are many. JSON: benchmarks/results/own_model.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rig.report import Ratio, Report

from trainer.config.run import SCRIPT, load_config
from trainer.config.script import read_script
from trainer.run.composition import roles

Step = tuple[float, float]
"""Seconds of processor time, and elapsed ones."""
TARGET = 1.03
WARM_UP = 2
SOURCE = """
import time, torch
from torch import nn

CALLS = []

def model():
    return MODEL

def dataset(split):
    if split != "train":
        return None
    x = torch.randn(512, SHAPE, generator=torch.Generator().manual_seed(0))
    return [(row, index % 10) for index, row in enumerate(x)]

def loss(model, samples):
    CALLS.append((time.process_time(), time.perf_counter()))
    x, y = zip(*samples)
    out = model(torch.stack(x))
    return nn.functional.cross_entropy(out, torch.tensor(y), reduction="sum"), len(y)
"""
MODELS = {
    "convolution, 0.3 M weights": (
        "nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),"
        " nn.ReLU(), nn.Flatten(), nn.Linear(32 * 28 * 28, 10))",
        "1, 28, 28",
        64,
    ),
    "transformer, 3.3 M weights": (
        "nn.Sequential(nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, 1024, 0.0,"
        " batch_first=True), 4), nn.Flatten(), nn.Linear(256 * 32, 10))",
        "32, 256",
        16,
    ),
}


def main() -> int:
    """Measure both models, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("own_model")
    for name, (model, shape, batch) in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="motley-own-model-") as folder:
            path = Path(folder) / "train.py"
            path.write_text(SOURCE.replace("MODEL", model).replace("SHAPE", shape))
            found = [compare(path, batch, options.steps, at) for at in range(options.rounds)]
        figures = {"seconds": [{"plain": plain, "motley": ours} for plain, ours in found]}
        for at, (what, target) in enumerate((("", TARGET), (", elapsed", None))):
            ratio = statistics.median(ours[at] / plain[at] for plain, ours in found)
            report.add(Ratio(f"{name}{what}", ratio, "a plain loop's step", target), **figures)
    return report.write()


def compare(path: Path, batch: int, steps: int, at: int) -> tuple[Step, Step]:
    """Return the median seconds of a step of both, which begin in turns."""
    ways = [run_plain, run_motley]
    found = {way: way(path, batch, steps, at) for way in (ways if at % 2 else ways[::-1])}
    return found[run_plain], found[run_motley]


def run_plain(path: Path, batch: int, steps: int, _at: int) -> Step:
    """Train in a loop as people write it."""
    functions: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), functions)
    torch.manual_seed(0)
    model, data = functions["model"](), functions["dataset"]("train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        samples = [data[(step * batch + index) % len(data)] for index in range(batch)]
        optimizer.zero_grad()
        total, count = functions["loss"](model, samples)
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total.item()
    return measure_step(functions["CALLS"])


def run_motley(path: Path, batch: int, steps: int, at: int) -> Step:
    """Train as `trainer finetune --script` does, in this process."""
    settings = {"training.max_steps": steps, "training.batch_size": batch, "tracking": ()}
    settings |= {"output": str(path.with_name(f"out-{at}")), "checkpoint.every": 10**6}
    config = load_config(None, {"task": SCRIPT, **settings})
    place = roles.Placement([], "cpu", 1, None, None, script=read_script(path))
    assert roles.run_local(config, "benchmark", place) == 0
    return measure_step(vars(sys.modules["motley_script"])["CALLS"][3:])  # three are the check's


def measure_step(calls: list[Step]) -> Step:
    """Return the median seconds from call to call."""
    pairs = [*pairwise(calls)][WARM_UP:]
    used, elapsed = ([after[at] - before[at] for before, after in pairs] for at in (0, 1))
    return statistics.median(used), statistics.median(elapsed)


if __name__ == "__main__":
    sys.exit(main())
