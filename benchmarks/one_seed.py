"""One run on CUDA and on the CPU from one seed: how far their losses are apart.

    python benchmarks/one_seed.py [--backends cpu cuda] [--steps 50] [--precisions fp32 bf16]

Each is `trainer finetune` of a small random model on generated commands, in a process of its own.
The first backend's run in fp32 is what the others are compared with: in fp32 the losses of all
steps agree within 1e-4 of their value, in bf16 within 2e-2. `--backends cpu cpu` is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rig.report import Ratio, Report, skip

from trainer.data.corpus import write_shell_safety
from trainer.init_model import ModelSizes, init_model

SIZES = ModelSizes(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=1024,
    max_position_embeddings=512,
)
TARGETS = {"fp32": 1e-4, "bf16": 2e-2}


def main() -> int:
    """Run, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs=2, default=["cpu", "cuda"], metavar="BACKEND")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precisions", nargs="+", choices=list(TARGETS), default=["fp32", "bf16"])
    options = parser.parse_args()
    reference, other = options.backends
    if "cuda" in options.backends and not torch.cuda.is_available():
        skip("no CUDA device; --backends cpu cpu is a rehearsal")
    report = Report("one_seed")
    with tempfile.TemporaryDirectory(prefix="motley-one-seed-") as folder:
        work = Path(folder)
        write_shell_safety(work / "data", 2000, 10, 7)
        init_model(work / "data" / "train.jsonl", work / "model", SIZES)
        first = losses_of(work, reference, "fp32", options.steps, "reference")
        for precision in options.precisions:
            found = losses_of(work, other, precision, options.steps, f"other-{precision}")
            apart = max(abs(a - b) / abs(a) for a, b in zip(first, found, strict=True))
            name = f"losses of {options.steps} steps apart, {other} in {precision}"
            against = f"the loss on {reference} in fp32"
            report.add(Ratio(name, apart, against, TARGETS[precision]), losses=found)
    return report.write()


def losses_of(work: Path, backend: str, precision: str, steps: int, name: str) -> list[float]:
    """Train and return the loss of every step.

    Raises:
        SystemExit: the run failed, with the end of its output.
    """
    command = [sys.executable, "-P", "-m", "trainer.cli", "finetune", str(work / "model")]
    command += ["--data", str(work / "data" / "train.jsonl"), "--gpu-backend", backend]
    settings: dict[str, object] = {
        "training.max_steps": steps,
        "training.precision": precision,
        "training.seed": 7,
        "training.batch_size": 16,
        "data.validation_fraction": 0,
        "output": str(work / name),
    }
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"one_seed.py: {backend} in {precision}: {done.stderr.strip()[-500:]}")
    lines = (work / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    return [event["loss"] for event in events if event["kind"] == "step"]


if __name__ == "__main__":
    raise SystemExit(main())
