"""The weight of the teacher in a student's loss: held-out cross-entropy by `distillation.alpha`.

    python benchmarks/alpha.py FOLDER [--seeds 3] [--alphas 0 0.2 0.5 0.7 1]
    python benchmarks/alpha.py FOLDER --report

A Qwen3 of four layers learns 2,000 texts; a student of two layers and another seed then learns from
its scores of 400 of them, at two learning rates with seed 0, at the better one with the others. The
texts are pieces of this system's manual pages, and names and descriptions of Debian's packages.
Everything is a command of `trainer`, on one thread.

A finished run is a line of FOLDER/results.jsonl and is not repeated, so it can be stopped at any
time. --report prints the table and writes benchmarks/results/alpha.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rig.finished import best, keep, read
from rig.real_data import pages
from rig.report import Ratio, Report

from tests.real.data import described, write_lines

TEXTS, TAUGHT, HELD_OUT, LENGTH = 2000, 400, 200, 128
TEACHER = {"hidden-size": 192, "layers": 4, "heads": 6, "kv-heads": 2, "head-dim": 32}
STUDENT = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3}
RATES = (1e-3, 3e-3)


@dataclass(frozen=True)
class Case:
    """One student."""

    data: str
    alpha: float
    seed: int
    rate: float


def descriptions(count: int) -> list[dict[str, Any]]:
    """Return texts of eight packages each, with their sections."""
    lines = [f"{row.section}: {row.text}" for row in described(8 * count)]
    return [{"text": "\n".join(lines[at : at + 8])} for at in range(0, len(lines), 8)]


DATA = {"pages": pages, "descriptions": descriptions}


def main() -> int:
    """Train what is missing, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="+", choices=list(DATA), default=list(DATA))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.2, 0.7, 0.5, 0, 1])
    parser.add_argument("--report", action="store_true", help="train nothing")
    options = parser.parse_args()
    results = options.folder / "results.jsonl"
    for seed in range(0 if options.report else options.seeds):
        for name in options.data:
            for alpha in options.alphas:
                for case in cases(name, alpha, seed, read(results, Case)):
                    if case not in read(results, Case):
                        loss = train_student(options.folder, case)
                        keep(results, case, {"loss": loss})
                        print(f"{case}: {loss:.4f}", flush=True)
    return report(read(results, Case))


def cases(name: str, alpha: float, seed: int, done: dict[Case, Any]) -> list[Case]:
    """Return every rate with seed 0, for other seeds the best of them."""
    swept = [Case(name, alpha, 0, rate) for rate in RATES]
    return swept if seed == 0 else [replace(best(swept, done), seed=seed)]


def prepare(folder: Path, name: str) -> Path:
    """Return the folder of a data set with its teacher and the teacher's scores."""
    folder = folder / name
    if not (folder / "logits" / "dataset.json").exists():
        rows = DATA[name](TEXTS + HELD_OUT)
        write_lines(folder / "held-out.jsonl", rows[:HELD_OUT])
        write_lines(folder / "texts.jsonl", rows[HELD_OUT:])
        write_lines(folder / "taught.jsonl", rows[HELD_OUT : HELD_OUT + TAUGHT])
        sizes = {**TEACHER, "intermediate-size": 512, "vocab-size": 1024}
        flags = [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
        call("init-model", "--data", folder / "texts.jsonl", "-o", folder / "model", *flags)
        call(
            *("finetune", folder / "model", "--data", folder / "texts.jsonl", "--epochs", 3),
            *("--task", "causal-lm", "--method", "full", "--max-seq-len", LENGTH),
            *("--batch-size", 16, "--learning-rate", 2e-3, "-o", folder / "teacher"),
            *("--validation", folder / "held-out.jsonl"),
        )
        call(
            *("distill", "teacher", folder / "teacher" / "model", "--dtype", "float32"),
            *("--data", folder / "taught.jsonl", "--out", folder / "logits"),
            *("--max-seq-len", LENGTH, "--seed", 0),
        )
    return folder


def train_student(folder: Path, case: Case) -> float:
    """Return the held-out cross-entropy of a student, in nats a token."""
    folder = prepare(folder, case.data)
    shape = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    shape |= {**STUDENT, "num_key_value_heads": 1, "intermediate_size": 256}
    shape.pop("layer_types", None)
    (folder / "student.json").write_text(json.dumps(shape), encoding="utf-8")
    output = folder / "student"
    shutil.rmtree(output, ignore_errors=True)
    call(
        *("distill", "student", "--teacher-logits", folder / "logits", "-o", output),
        *("--student-config", folder / "student.json", "--tokenizer", folder / "model"),
        *("--alpha", case.alpha, "--learning-rate", case.rate, "--epochs", 6, "--batch-size", 16),
        *("--validation", folder / "held-out.jsonl", "--set", f"training.seed={case.seed}"),
    )
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line) for line in lines if '"validation"' in line]
    return float(losses[-1]["loss"])


def call(*arguments: object) -> None:
    """Run a command of `trainer` on one thread."""
    words = [str(each) for each in arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    threads = [] if words[0] == "init-model" else ["--threads", "1"]
    program = [sys.executable, "-m", "trainer", *words, *threads]
    done = subprocess.run(program, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"trainer {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def report(done: dict[Case, Any]) -> int:
    """Print the mean of each alpha over its seeds beside alpha 0.7's."""
    found = Report("alpha")
    for name in DATA:
        means: dict[float, float] = {}
        for alpha in sorted({case.alpha for case in done if case.data == name}):
            swept = [case for case in done if case.data == name and case.alpha == alpha]
            rate = best([case for case in swept if case.seed == 0], done).rate
            losses = [done[case]["loss"] for case in swept if case.rate == rate]
            means[alpha] = statistics.fmean(losses)
            print(f"{name}, alpha {alpha}, rate {rate:g}: {losses} mean {means[alpha]:.4f}")
        for alpha, mean in means.items():
            if 0.7 in means:
                ratio = Ratio(f"{name}, alpha {alpha:g}", mean / means[0.7], "alpha 0.7's loss")
                found.add(ratio, loss=mean)
    return found.write()


if __name__ == "__main__":
    sys.exit(main())
