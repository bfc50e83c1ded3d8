"""What generated answers cost, and whether a student learns more from its own."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from rig.report import Ratio, Report
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.answers.opened import open_shards
from trainer.distill.answers.rounds import find_rounds
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.teacher.torch_author import open_generate
from trainer.replica.backend import Compute
from trainer.replica.sampling import ScoredSampling
from trainer.tracking.metrics import read_metrics

_PROMPT = 32
"""Tokens of a prompt: the beginning of a document."""


def generate(report: Report, arguments: argparse.Namespace) -> None:
    """New tokens a CPU second on one thread, by the answers that are written together."""
    model: Path = arguments.model
    text = Path(__file__).read_text(encoding="utf-8")
    ids = load_tokenizer(model).encode(text).ids
    speed: dict[int, float] = {}
    for batch in (1, 8, 32):
        write = open_generate(model, "float32", Compute("cpu", threads=1), batch)
        prompts = [ids[at : at + _PROMPT] for at in range(batch)]
        sampling = ScoredSampling(temperature=1.0, numbers=range(batch))
        write(prompts, max_new_tokens=2, sampling=sampling)  # warms up
        began = time.process_time()
        made = write(prompts, max_new_tokens=arguments.tokens, sampling=sampling)
        speed[batch] = sum(map(len, made)) / (time.process_time() - began)
        print(f"batch {batch}: {speed[batch]:,.0f} new tokens per CPU second", flush=True)
    report.add(
        Ratio("32 answers at once", speed[32] / speed[1], "one at a time", better="higher"),
        tokens_per_cpu_second=speed,
    )


def on_policy(report: Report, arguments: argparse.Namespace) -> None:
    """Held-out loss of students that heal, at equal windows of their teacher.

    The student is the teacher without every second layer. Each arm has its own best learning rate;
    the teacher of each arm scores about as many tokens, which are reported.
    """
    windows = arguments.steps * arguments.batch_size
    with ExitStack() as stack:
        bench = Path(arguments.folder or stack.enter_context(tempfile.TemporaryDirectory()))
        student = halved(arguments.model, bench / "student")
        arms = {"text": (windows, 0.0), "offline": (windows, 1.0), "onpolicy": (windows // 2, 1.0)}
        losses: dict[str, list[float]] = {}
        figures: dict[str, Any] = {}
        for arm, (count, alpha) in arms.items():
            best: list[float] | None = None
            for rate in arguments.rates:
                runs = [
                    _run(arm, arguments, bench, student, count, alpha, rate, seed)
                    for seed in range(arguments.seeds)
                ]
                found = [run["loss"] for run in runs]
                figures[f"{arm} {rate:g}"] = runs
                print(f"{arm}, learning rate {rate:g}: {found}", flush=True)
                if best is None or mean(found) < mean(best):
                    best = found
            assert best is not None, "give --rates"
            losses[arm] = best
    spread = {arm: stdev(each) if len(each) > 1 else 0.0 for arm, each in losses.items()}
    for arm in ("text", "offline"):
        report.add(
            Ratio("on-policy", mean(losses["onpolicy"]) / mean(losses[arm]), f"{arm}, nats", 1.0),
            losses=losses,
            deviation=spread,
            runs=figures,
        )


def halved(model: Path, folder: Path) -> Path:
    """Write a model without every second layer, and return its folder."""
    if folder.exists():
        return folder
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((model / "config.json").read_bytes())
    kept = range(0, config["num_hidden_layers"], 2)
    weights: dict[str, np.ndarray] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, values in load_file(file).items():
            parts = name.split(".")
            if "layers" in parts:
                at = parts.index("layers") + 1
                if int(parts[at]) not in kept:
                    continue
                parts[at] = str(kept.index(int(parts[at])))
            weights[".".join(parts)] = values
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": len(kept), "layer_types": None})
    )
    return folder


def _run(
    arm: str,
    arguments: argparse.Namespace,
    bench: Path,
    student: Path,
    windows: int,
    alpha: float,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """Train one student beside its teacher; return its held-out loss, curve and idle share."""
    name = f"{arm}-{rate:g}-{seed}"
    logits, output = bench / f"logits-{arm}-{seed}-{rate:g}", bench / name
    corpus, prompts = _corpus(arguments, bench, windows)
    settings: dict[str, Any] = {
        "optimizer.learning_rate": rate,
        "training.seed": seed,
        "training.batch_size": arguments.batch_size,
        "training.max_steps": arguments.steps,
        "training.evaluate_every": max(1, arguments.steps // 10),
        "data.validation": arguments.held_out,
        "data.max_seq_len": arguments.window,
        "distillation.alpha": alpha,
    }
    if arm == "onpolicy":
        new = arguments.window - _PROMPT
        own = {"prompts": prompts, "max_new_tokens": new, "staleness": 8, "fraction": 0.5}
        settings |= {f"distillation.on_policy.{key}": value for key, value in own.items()}
    program = [sys.executable, "-m", "trainer.cli", "distill"]
    place = ["--gpu-backend", arguments.backend, "--threads", str(arguments.threads)]
    teacher = [*program, "teacher", str(arguments.model), "--data", str(corpus), "--stay"]
    teacher += ["--out", str(logits), "--until", str(output / "status.json"), *place]
    teacher += ["--max-seq-len", str(arguments.window), "--dtype", "float32"]
    learner = [*program, "student", "--teacher-logits", str(logits), "--student", str(student)]
    learner += ["-o", str(output), "--teacher-timeout", "600", *place]
    learner += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with subprocess.Popen(teacher) as scoring:
        subprocess.run(learner, check=True)
        scoring.wait()
    records = list(read_metrics(output / "metrics.jsonl"))
    steps = [each for each in records if each["kind"] == "step"]
    curve = [(each["step"], each["loss"]) for each in records if each["kind"] == "validation"]
    waited = sum(each["waited_seconds"] for each in steps)
    tokens = LogitsFolder(logits).description.tokens
    for rounds in find_rounds(logits):
        tokens += sum(plan.tokens for plan in open_shards(rounds.path).plans)
    return {
        "loss": min(loss for _, loss in curve),
        "curve": curve,
        "idle": waited / (steps[-1]["time"] - steps[0]["time"]),
        "teacher_tokens": tokens,
    }


def _corpus(arguments: argparse.Namespace, bench: Path, windows: int) -> tuple[Path, Path]:
    """Write the first windows of a text as documents, and the beginning of others as prompts."""
    corpus, prompts = bench / f"corpus-{windows}.jsonl", bench / "prompts.jsonl"
    if corpus.exists():
        return corpus, prompts
    tokenizer = load_tokenizer(arguments.model)
    ids = tokenizer.encode(Path(arguments.text).read_text(encoding="utf-8")).ids
    size = arguments.window - 1  # and the end of a text

    def line(at: int, length: int) -> str:
        return json.dumps({"text": tokenizer.decode(ids[at : at + length])}) + "\n"

    starts = range(0, min(len(ids) - size, windows * size), size)
    corpus.write_text("".join(line(at, size) for at in starts), encoding="utf-8")
    prompts.write_text("".join(line(at, _PROMPT) for at in starts), encoding="utf-8")
    return corpus, prompts
