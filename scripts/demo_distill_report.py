"""The distillation demo's report: did the teacher help, and what did its words cost?

Usage: python scripts/demo_distill_report.py OUTPUT TEACHER
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.encoder import IGNORED, Encoder
from trainer.data.samples import read_file
from trainer.model.safetensors_headers import read_headers
from trainer.tracking.metrics import read_metrics

BIN = Path(sys.executable).parent
SEEDS = (0, 1, 2)
OBJECTIVES = ("text", "topk", "sampled", "full")


def printed(*command: str | Path) -> dict[str, Any]:
    """Return the JSON object that a program of the project prints."""
    done = subprocess.run([BIN / "trainer", *command, "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def parameters(model: Path) -> int:
    """Return how many weights a model folder stores."""
    return sum(math.prod(header.shape) for header in read_headers(model).values())


def validation_loss(run: Path) -> tuple[int, float]:
    """Return the last step of a run and its validation loss, in nats a token."""
    last = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "validation"][
        -1
    ]
    return last["step"], last["loss"]


def tokens_a_character(data: Path, tokenizer: Path, max_seq_len: int) -> float:
    """Return how many tokens a loss counts for each character of a data file."""
    file = read_file(data, "causal-lm", None)
    dataset = file.open_dataset(Encoder(tokenizer), "causal-lm", max_seq_len)
    counted = sum(
        int(np.count_nonzero(np.not_equal(dataset[index].labels, IGNORED)))
        for index in range(len(dataset))
    )
    characters = sum(len(json.loads(line)["text"]) for line in data.open())
    return counted / characters


def spread(values: list[float]) -> str:
    """Return mean and sample standard deviation."""
    return f"{statistics.mean(values):.4f} +- {statistics.stdev(values):.4f}"


def overlap(run: Path, logits: Path) -> str:
    """Say how much of the logits was there when the student took its first step."""
    steps = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "step"]
    shards = sorted(path.stat().st_mtime for path in logits.glob("shard-*/manifest.json"))
    there = sum(time < steps[0]["time"] for time in shards)
    waited = sum(step["teacher_wait_seconds"] for step in steps)
    last = sum(step["time"] < shards[-1] for step in steps)
    return (
        f"took its first step with {there} of {len(shards)} shards there and {last} of {len(steps)}"
        f" before the last one came; waited {waited:.1f} s for the teacher"
    )


def evaluated(run: Path) -> str:
    """Say which checkpoints the eval runner scored."""
    lines = (run / "evaluations/evaluations.jsonl").read_text().splitlines()
    records = sorted(map(json.loads, lines), key=lambda record: record["step"])
    assert len({record["digest"] for record in records}) == len(records), "scored twice"
    losses = [
        f"{record['step']}: {record['tasks']['loss']['figures']['loss']:.3f}"
        if record["state"] == "scored"
        else f"{record['step']}: {record['reason']}"
        for record in records
    ]
    return "scored each checkpoint once, step: loss  " + "  ".join(losses)


def main() -> None:
    """Print the report."""
    output, teacher = Path(sys.argv[1]), Path(sys.argv[2])
    validation, students = output / "data/validation.jsonl", output / "students"
    model = students / "topk-0/student"
    losses: dict[str, list[float]] = {}
    steps: set[int] = set()
    for name in OBJECTIVES:
        found = [validation_loss(students / f"{name}-{seed}") for seed in SEEDS]
        losses[name] = [loss for _, loss in found]
        steps.update(step for step, _ in found)
    assert len(steps) == 1, f"the students took different numbers of steps: {steps}"

    theirs = printed("evaluate", teacher, "--data", validation, "--gpu-backend", "cpu")["loss"]
    rate = tokens_a_character(validation, model, 512)
    whole = theirs * tokens_a_character(validation, teacher, 512)
    big, small = parameters(teacher), parameters(model)
    print(f"teacher    {big:,} weights, {whole:.4f} nats a character of the validation texts")
    print(f"students   {small:,} weights ({big / small:.1f} times fewer), {steps.pop()} steps each")
    print(f"meanwhile  the student {overlap(students / 'topk-0', output / 'logits/topk')}")
    print(f"eval       the runner {evaluated(students / 'topk-0')}")

    print("\nvalidation loss, mean and standard deviation of three seeds")
    print("learned from  nats a token       nats a character  against the text  bytes a token")
    for name in OBJECTIVES:
        gains = [loss - text for loss, text in zip(losses[name], losses["text"], strict=True)]
        line = f"{name:12}  {spread(losses[name])}  {statistics.mean(losses[name]) * rate:16.4f}"
        if name != "text":
            found = printed("distill", "inspect", output / "logits" / name)["found"]
            line += f"  {spread(gains):>17}  {found['bytes_per_token']:13.1f}"
        print(line)
    print()
    for name in OBJECTIVES[1:]:
        worse = [loss >= text for loss, text in zip(losses[name], losses["text"], strict=True)]
        verdict = (
            "helped with every seed"
            if not any(worse)
            else "did not help"
            if all(worse)
            else f"helped with {worse.count(False)} of {len(SEEDS)} seeds only"
        )
        print(f"the teacher's logits ({name}) {verdict}")


if __name__ == "__main__":
    main()
