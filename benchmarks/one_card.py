"""Tokens a second, MFU and peak memory of Motley, PEFT and TRL, in turns on one card.

    python benchmarks/one_card.py --shape 0.6b --models DIR [--methods lora qlora full] [--rows 4]
        [--tokens 2048] [--steps 8] [--repeats 2] [--seconds 480] [--recompute] [--profile]
        [--device cuda|cpu] [--trainers motley peft trl] [--output FILE]

All take the same ROWS x TOKENS random tokens a step through the same model with random weights, of
the shape of Qwen3-0.6B or 4B: with LoRA of rank 16 on every linear, with the same on an NF4 base,
or all weights. Adapters begin equal, so the losses of all steps are equal but for rounding. Motley
is a run of one worker, whose AdamW is the coordinator's, on the host; PEFT is the loop of its
documentation with torch's fused AdamW; TRL, where it is installed, is SFTTrainer. On a card
products are in bf16; on the CPU everything is in fp32, for a rehearsal. Each is a process of its
own, and they take turns: each method once, then again. Nothing is recomputed without `--recompute`.

The model is DIR/SHAPE, written once in seconds and used by all that get this DIR; without
`--models` it is temporary. FILE (benchmarks/results/one_card-SHAPE.json) is written after each
process; it names with `left_out` what SECONDS were too short for, and with `error` a process that
failed. The first two steps do not count. Memory is the most that torch's allocator held on the
card, beside Motley's plan; on the CPU the largest resident set, which includes libraries. MFU is
that of benchmarks/strategies.py. `--profile` adds three steps under torch's profiler: the largest
kernels, and the calls in which the host waits for the card. Exit 1: losses differ, a mark for cards
is missed or a process failed; 2: it cannot start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rig.model_folders import SHAPES, model_folder
from rig.report import Ratio, Report
from rig.training_step import METHODS

from trainer.system.errors import InputError

if TYPE_CHECKING:
    from rig.one_card_trainers import Job

TRAINERS = ("motley", "peft", "trl")
NEEDS = {"motley": ("torch",), "peft": ("peft", "transformers"), "trl": ("trl", "datasets")}
ROUNDED = {"cpu": 1e-4, "cuda": 1e-2}
"""How far losses may be apart, as a share: in fp32, and in bf16, where each rounds elsewhere."""
FASTER, LESS, PLANNED = 1.0, 0.9, 1.1
"""Marks for a card: tokens/s of PEFT's at least, memory of PEFT's and of the plan at most."""


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(words)
    if options.job:
        print("\n" + json.dumps(measure_here(**json.loads(options.job))))
        return 0
    import torch

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch finds no CUDA device", file=sys.stderr)
        return 2
    report = Report(f"one_card-{options.shape}", options.output)
    ends = time.monotonic() + options.seconds
    try:
        report.write()  # a file that cannot be written is refused before anything runs
        with model_folder(options.models, options.shape) as folder:
            runs = run_in_turns(folder, device, ends, options, report)
    except (InputError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    compare(runs, device, report)
    return max(report.write(), int(any("error" in figures for figures in report.figures)))


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--models", type=Path, help="where model folders are, or come")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rows", type=positive, default=4, help="of a step")
    parser.add_argument("--tokens", type=positive, default=256, help="of a row")
    parser.add_argument("--steps", type=positive, default=8)
    parser.add_argument("--repeats", type=positive, default=2)
    parser.add_argument("--seconds", type=positive, default=480, help="for everything")
    parser.add_argument("--recompute", action="store_true", help="compute layers twice")
    parser.add_argument("--profile", action="store_true", help="of three steps in the first turn")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a card if there is one")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, help="default: the installed")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    given = options.trainers or [name for name in TRAINERS if not missing(name)]
    for name in given:
        if absent := missing(name):
            parser.error(f"--trainers {name}: {absent} is not installed")
    options.trainers = given
    return options


def positive(text: str) -> int:
    """Return a number from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("needs at least 1")
    return number


def missing(trainer: str) -> str:
    """Return a package that a trainer needs and that is not installed, or nothing."""
    return next((name for name in NEEDS[trainer] if find_spec(name) is None), "")


def run_in_turns(
    folder: Path, device: str, ends: float, options: argparse.Namespace, report: Report
) -> dict[str, dict[str, list[Any]]]:
    """Return the figures of every process by method and trainer; what has none is reported."""
    runs: dict[str, dict[str, list[Any]]] = {
        method: {name: [] for name in options.trainers} for method in options.methods
    }
    for turn, method, name in turns(options):
        job = {
            "trainer": name,
            "job": {
                "folder": str(folder),
                "method": method,
                "rows": options.rows,
                "tokens": options.tokens,
                "device": "cuda:0" if device == "cuda" else "cpu",
                "recompute": options.recompute,
            },
            "steps": options.steps,
            "profiled": options.profile and turn == 0,
        }
        what = {"trainer": name, "method": method, "turn": turn}
        left = ends - time.monotonic()
        if left <= 0:
            report.figures.append({**what, "left_out": f"after {options.seconds} s"})
        else:
            found = run_process(job, left)
            report.figures.append({**what, **found})
            print(line(what, found), flush=True)
            if "error" not in found and "left_out" not in found:
                runs[method][name].append(found)
        report.write()
    return runs


def turns(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Yield what runs, in order."""
    for turn in range(options.repeats):
        for method in options.methods:
            for name in options.trainers:
                yield turn, method, name


def run_process(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the figures of one process, or why there are none."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return {"left_out": f"not done when its {seconds:.0f} s were over"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"ended with {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def line(what: dict[str, Any], found: dict[str, Any]) -> str:
    """Return a process's figures for people."""
    start = f"{what['method']}, {what['trainer']}: "
    if reason := found.get("error") or found.get("left_out"):
        return start + reason
    mfu = "unknown" if found["mfu"] is None else f"{100 * found['mfu']:.1f} %"
    return (
        f"{start}{found['tokens_per_second']:,.0f} tokens/s, MFU {mfu},"
        f" peak {found['peak_bytes'] / 2**30:.2f} GiB, last loss {found['losses'][-1]:.4f}"
    )


def measure_here(trainer: str, job: dict[str, Any], steps: int, profiled: bool) -> dict[str, Any]:
    """Return the figures of one trainer in this process."""
    import torch
    from rig.one_card_trainers import TRAINERS as RUNNERS
    from rig.one_card_trainers import Job
    from rig.step_clock import StepClock

    given = Job(**job)
    clock = StepClock(torch.device(given.device), steps, profiled=profiled)
    RUNNERS[trainer](given, clock)
    found = clock.figures()
    rate = given.rows * given.tokens / statistics.median(found["seconds"])
    return {
        **asdict(given),
        "device": torch.cuda.get_device_name(0) if given.on_card else "CPU",
        "tokens_per_second": rate,
        "mfu": utilization(given, rate, torch.cuda.get_device_name(0)) if given.on_card else None,
        "plan_bytes": given.planned_bytes(),
        **found,
    }


def utilization(job: Job, rate: float, card: str) -> float | None:
    """Return MFU on a card, if its peak is known."""
    from rig.training_step import flops_utilization

    from trainer.planning.model_config import read_shape
    from trainer.planning.replica import make_training_setup

    training = make_training_setup(job.config(), accelerator=True, recompute=job.recompute)
    return flops_utilization(read_shape(Path(job.folder)), training, rate, card, 1)


def compare(runs: dict[str, dict[str, list[Any]]], device: str, report: Report) -> None:
    """Report Motley's speed, memory and losses beside the others'; on the CPU without marks."""
    for method, by_name in runs.items():
        own = by_name.get("motley")
        if own and device == "cuda":
            planned = own[0]["peak_bytes"] / own[0]["plan_bytes"]
            report.add(Ratio(f"{method}: Motley's peak", planned, "the plan", PLANNED))
        for name, its in by_name.items():
            if name == "motley" or not own or not its:
                continue
            rates, peaks, losses = (
                [middle(found, key) for found in (own, its)]
                for key in ("tokens_per_second", "peak_bytes", "losses")
            )
            marked = device == "cuda" and name == "peft" and method != "full"
            speed = f"{method}: Motley's tokens/s"
            mark = FASTER if marked else None
            report.add(Ratio(speed, rates[0] / rates[1], name, mark, "higher"))
            mark = LESS if marked else None
            report.add(Ratio(f"{method}: Motley's peak", peaks[0] / peaks[1], name, mark))
            apart = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
            far = f"{method}: losses apart, at most"
            report.add(Ratio(far, apart, f"{name}'s", ROUNDED[device]))


def middle(found: list[Any], key: str) -> Any:
    """Return the median of a figure over all turns; of losses those of the first."""
    if key == "losses":
        return found[0][key]
    return statistics.median(each[key] for each in found)


if __name__ == "__main__":
    sys.exit(main())
