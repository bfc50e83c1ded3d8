"""A replica group of two beside a single worker in the exchange, over the sum of each alone.

    python benchmarks/replica_group.py [--steps 12] [--cost 0.05]

Real coordinators and workers on loopback train a small model, full fine-tuning. Computing takes
little of a step: every process, the members of the group too, sleeps for each sample, so that
four processes do not need four processors, and what is left to measure is the exchange and how
samples are shared. Throughput is samples over the seconds of all steps after the first few.
JSON: benchmarks/results/replica_group.json.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rig.report import Ratio, Report

from trainer.init_model import ModelSizes, init_model

HERE = Path(__file__).parent
BATCH, WARM_UP = 30, 4
SIZES = ModelSizes(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=512,
)
SINGLE = ("--gpu-backend", "cpu")
TARGET = 0.95
DEADLINE = 600.0
"""Seconds for a run."""


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cost", type=float, default=0.05, help="seconds a sample sleeps")
    parser.add_argument("--result", default="replica_group", help="name of the JSON file")
    options = parser.parse_args()
    group = (*SINGLE, "--gpus", "0,1", "--strategy", "ddp")
    report = Report(options.result)
    with tempfile.TemporaryDirectory(prefix="motley-group-") as scratch:
        folder = Path(scratch)
        data = folder / "data.jsonl"
        samples = ({"input": f"echo {n % 7} > file", "label": n % 3} for n in range(300))
        data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        init_model(data, folder / "model", SIZES, 0)
        speeds = {
            name: speed(folder, name, workers, options.steps, options.cost)
            for name, workers in {
                "single": (SINGLE,),
                "group": (group,),
                "both": (group, SINGLE),
            }.items()
        }
    alone = speeds["single"] + speeds["group"]
    report.add(
        Ratio(
            "a group of two beside a single worker, samples a second",
            speeds["both"] / alone,
            f"the sum of each alone ({alone:.1f}/s)",
            TARGET,
            "higher",
        ),
        samples_per_second={name: round(value, 2) for name, value in speeds.items()},
    )
    return report.write()


def speed(
    folder: Path, name: str, workers: tuple[tuple[str, ...], ...], steps: int, cost: float
) -> float:
    """Return the samples a second of a run of these workers, given by their flags."""
    output = folder / name
    common = [str(folder / "model"), "--data", str(folder / "data.jsonl"), "--num-classes", "3"]
    common += ["-o", str(output), "--method", "full", "--batch-size", str(BATCH)]
    common += ["--max-steps", str(WARM_UP + steps), "--run-id", name, "--threads", "1"]
    common += ["--set", "checkpoint.every=1000", "--set", "data.validation_fraction=0"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    roles = [["--role", "coordinator", "--bind", address, "--expect-workers", str(len(workers))]]
    for rank, flags in enumerate(workers):
        roles.append(["--role", "worker", "--rank", str(rank), "--coordinator", address, *flags])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for role in roles:
            command = [sys.executable, "-m", "rig.slowed", str(cost), "finetune", *common, *role]
            running.append(
                subprocess.Popen(
                    command,
                    cwd=HERE,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
        for process in running:
            if code := process.wait(DEADLINE):
                sys.exit(f"replica_group: a process of {name} ended with {code}")
    finally:
        for process in running:
            process.kill()
            process.wait()
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    ends = [record["time"] for record in records if record["kind"] == "step"][WARM_UP - 1 :]
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0])


if __name__ == "__main__":
    sys.exit(main())
