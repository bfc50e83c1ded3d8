"""A student without every second layer of its teacher heals by what the teacher says of texts.

Each run is a teacher and a student as a person starts them. Texts are pieces of manual pages
(`real_data`); prompts are their beginnings. All arms take as many steps of as many windows, and
about as many tokens are scored for each. Each arm has its own learning rate: the best one of
`LADDER` with seed 0, between two that are worse where the ladder goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil

from rig.finished import Found, best, keep, read
from rig.real_data import DATA, layers_of, with_layers
from rig.report import Ratio, Report
from rig.sparse import thinned
from tests.real.data import write_lines
from tests.real.packages import model_file
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.answers.opened import open_shards
from trainer.distill.answers.rounds import ON_POLICY, find_rounds
from trainer.distill.logits.dataset import LogitsFolder
from trainer.model.files import resolve_model
from trainer.tracking.metrics import read_metrics

LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
_FIRST = 2, 5
"""From and to in the ladder; it goes on where the best rate is at an end."""
_PROMPT = 32
"""Tokens of a prompt: the beginning of a text."""
_SPARE = 4
"""Tokens of a window that are left for the end of a text, and for one that was cut in a letter."""
_HELD_OUT = 100
"""Texts that a student's loss is of: at each point of a curve they take time from the training."""
_POINTS = 5
"""Of a curve of held-out losses, the last one included."""
_FRACTION = 0.5
"""Of a step's samples, those that are answers."""


@dataclass(frozen=True)
class Arm:
    """A way to learn: settings of the student's run config."""

    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    scored: float = 1.0
    """Share of the positions that keep their scores."""

    @property
    def answers(self) -> bool:
        """Whether the student learns from answers of its own."""
        return "distillation.on_policy.divergence" in self.settings

    @property
    def is_usual(self) -> bool:
        """Whether others are compared with it."""
        return not self.answers and self.scored == 1


def _own(divergence: str) -> Arm:
    return Arm({"distillation.alpha": 1.0, "distillation.on_policy.divergence": divergence})


ARMS = {
    "onpolicy": {
        "text": Arm({"distillation.alpha": 0.0}),
        "offline": Arm({"distillation.alpha": 1.0}),
        "alpha 0.7": Arm({"distillation.alpha": 0.7}),
        "alpha 0.2": Arm({"distillation.alpha": 0.2}),
        "a fifth scored": Arm({"distillation.alpha": 1.0}, scored=0.2),
        "reverse KL": _own("reverse"),
        "JSD": _own("jsd"),
    },
}
"""By part of the benchmark. Without answers all arms score the same tokens; beside answers, half as
many of the texts are scored. With a fifth scored, the other positions learn their text."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    part: str
    arm: str
    rate: float
    seed: int
    steps: int
    batch_size: int
    window: int

    @property
    def way(self) -> Arm:
        """What the arm does."""
        return ARMS[self.part][self.arm]

    @property
    def windows(self) -> int:
        """The windows that students learn from, each once."""
        return self.steps * self.batch_size

    @property
    def texts(self) -> int:
        """Those of them that are texts of the corpus."""
        answers = round(_FRACTION * self.batch_size) if self.way.answers else 0
        return self.steps * (self.batch_size - answers)


Results = Mapping[Case, Found]


@dataclass(frozen=True)
class Setup:
    """What all runs of a sweep share."""

    model: Path
    work: Path
    """For data, models, logits; one sweep at a time uses it."""
    place: tuple[str, ...]
    """Flags of teacher and student that say where they compute."""


def sweep(report: Report, arguments: argparse.Namespace) -> int:
    """Train what is missing, or report; return the exit code."""
    done = read(arguments.results, Case)
    wanted = _Wanted(arguments, done)
    if arguments.report:
        _report(report, wanted)
        return report.write()
    setup = Setup(
        (arguments.model or resolve_model(str(model_file()))).resolve(),
        (arguments.work or arguments.results.parent / "work").resolve(),
        ("--gpu-backend", arguments.backend, "--threads", str(arguments.threads)),
    )
    for _ in range(arguments.limit):
        case = next((case for case in wanted.cases() if case not in done), None)
        if case is None:
            break
        done[case] = train(case, setup)
        keep(arguments.results, case, done[case])
        print(f"{case.arm}, {case.rate:g}, seed {case.seed}: {done[case]['loss']:.4f}", flush=True)
    return 0


class _Wanted:
    """The runs that a sweep asks for, by what the finished ones found."""

    def __init__(self, arguments: argparse.Namespace, done: Results) -> None:
        sizes = (arguments.steps, arguments.batch_size, arguments.window)
        self.arms = [
            Case(arguments.part, arm, LADDER[0], 0, *sizes) for arm in ARMS[arguments.part]
        ]
        self._seeds, self._done = arguments.seeds, done

    def cases(self) -> Iterator[Case]:
        """Yield every run, those that answer most first."""
        for arm in self.arms:
            yield from self._searched(arm)
        for seed in range(1, self._seeds):
            for arm in self.arms:
                if (chosen := self.chosen(arm)) is not None:
                    yield replace(chosen, seed=seed)

    def chosen(self, arm: Case) -> Case | None:
        """Return an arm's run of seed 0 with its own rate; None if that is not known yet."""
        tried = list(self._searched(arm))
        return best(tried, self._done) if all(case in self._done for case in tried) else None

    def found(self, arm: Case) -> list[Found]:
        """Return the finished runs of an arm at its rate, by seed."""
        chosen = self.chosen(arm)
        seeds = [replace(chosen, seed=seed) for seed in range(self._seeds)] if chosen else []
        return [self._done[case] for case in seeds if case in self._done]

    def _searched(self, arm: Case) -> Iterator[Case]:
        """Yield runs of seed 0 until the best rate is between two others, or at an end."""
        ladder = [replace(arm, rate=rate) for rate in LADDER]
        first, stop = _FIRST
        yield from ladder[first:stop]
        while all(case in self._done for case in ladder[first:stop]):
            chosen = ladder.index(best(ladder[first:stop], self._done))
            if chosen == first > 0:
                first -= 1
                yield ladder[first]
            elif chosen == stop - 1 < len(ladder) - 1:
                yield ladder[stop]
                stop += 1
            else:
                return


def train(case: Case, setup: Setup) -> Found:
    """Train one student; return its held-out loss and curve, its idle share and its writing's."""
    arm, work = case.way, setup.work
    student = with_layers(setup.model, work / "half", range(0, layers_of(setup.model), 2))
    corpus, prompts, held_out = _texts(case, student, work)
    logits, output = work / f"logits-{case.texts}-{case.window}", work / "output"
    for begun in (output, logits / ON_POLICY):
        shutil.rmtree(begun, ignore_errors=True)
    settings: dict[str, Any] = {
        "optimizer.learning_rate": case.rate,
        "training.seed": case.seed,
        "training.batch_size": case.batch_size,
        "training.max_steps": case.steps,
        "training.evaluate_every": max(1, case.steps // _POINTS),
        "checkpoint.every": case.steps,
        "data.validation": held_out,
        "data.max_seq_len": case.window,
        **arm.settings,
    }
    if arm.answers:
        own = {"prompts": prompts, "max_new_tokens": case.window - _PROMPT, "fraction": _FRACTION}
        settings |= {f"distillation.on_policy.{key}": value for key, value in own.items()}
    program = [sys.executable, "-m", "trainer.cli", "distill"]
    teacher = [*program, "teacher", str(setup.model), "--data", str(corpus), "--out", str(logits)]
    teacher += ["--tokenizer", str(student), "--max-seq-len", str(case.window), *setup.place]
    teacher += ["--dtype", "float32"]
    learner = [*program, "student", "--student", str(student), "-o", str(output)]
    learner += ["--teacher-timeout", "600", *setup.place]
    learner += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    began, busy = time.monotonic(), None
    if arm.answers:
        with subprocess.Popen([*teacher, "--stay"]) as scoring:
            try:
                subprocess.run([*learner, "--teacher-logits", str(logits)], check=True)
                busy = sum(psutil.Process(scoring.pid).cpu_times()[:2])
            finally:
                scoring.terminate()
    else:
        subprocess.run(teacher, check=True)
        shown = logits
        if arm.scored < 1:
            own = work / f"{logits.name}-by-student"
            at = {str(setup.model): str(student), str(logits): str(own)}
            subprocess.run([at.get(word, word) for word in teacher], check=True)
            shown = work / f"{logits.name}-{arm.scored:g}"
            thinned(LogitsFolder(logits), LogitsFolder(own), arm.scored, shown)
        began = time.monotonic()
        subprocess.run([*learner, "--teacher-logits", str(shown)], check=True)
    seconds = time.monotonic() - began
    records = read_metrics(output / "metrics.jsonl")
    steps = [each for each in records if each["kind"] == "step"]
    curve = [(each["step"], each["loss"]) for each in records if each["kind"] == "validation"]
    tokens = LogitsFolder(logits).description.tokens
    for rounds in find_rounds(logits):
        tokens += sum(plan.tokens for plan in open_shards(rounds.path).plans)
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "seconds": round(seconds, 1),
        "idle": _share(steps, "waited_seconds"),
        "writing": _share(steps, "wrote_seconds"),
        "teacher_busy": None if busy is None else busy / seconds,
        "teacher_tokens": tokens,
    }


def _share(steps: list[Found], key: str) -> float:
    """Return a share of the time from the first step, for which the teacher starts, to the last."""
    seconds = steps[-1]["time"] - steps[0]["time"]
    return sum(each.get(key, 0.0) for each in steps[1:]) / seconds


def _pages(case: Case, work: Path) -> tuple[Path, Path]:
    """Return the files of texts and of held-out ones, whole."""
    return DATA["pages"].write(work / f"pages-{case.windows}", case.windows)


def _texts(case: Case, student: Path, work: Path) -> tuple[Path, Path, Path]:
    """Write and return the corpus of a case, its prompts and held-out texts, a window each."""
    tokenizer = load_tokenizer(student)

    def cut(file: Path, length: int) -> list[dict[str, Any]]:
        texts = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [{"text": tokenizer.decode(each.ids[:length])} for each in found]

    texts, held_out = _pages(case, work)
    folder, length = work / "texts", case.window - _SPARE
    return (
        write_lines(folder / "corpus.jsonl", cut(texts, length)[: case.texts]),
        write_lines(folder / "prompts.jsonl", cut(texts, _PROMPT - _SPARE)),
        write_lines(folder / "held-out.jsonl", cut(held_out, length)[:_HELD_OUT]),
    )


def _report(report: Report, wanted: _Wanted) -> None:
    """Add an arm's loss over that of each arm before it, and what it waited.

    Losses are compared over the seeds that both have.
    """
    found = {arm.arm: wanted.found(arm) for arm in wanted.arms}
    known = [arm for arm in wanted.arms if found[arm.arm]]
    if unknown := [name for name, runs in found.items() if not runs]:
        print(f"no rate is known yet of {', '.join(unknown)}")
    losses = {name: [run["loss"] for run in runs] for name, runs in found.items() if runs}
    rates = {arm.arm: chosen.rate for arm in known if (chosen := wanted.chosen(arm))}
    base = [arm.arm for arm in known if arm.way.is_usual]
    for arm in known:
        if arm.arm in base:
            continue
        for against in base:
            pairs = list(zip(losses[arm.arm], losses[against], strict=False))
            ours, theirs = (mean(each) for each in zip(*pairs, strict=True))
            report.add(
                Ratio(arm.arm, ours / theirs, f"{against}, held-out nats a token", 1.0),
                seeds=len(pairs),
                losses=losses,
                deviation={name: stdev(each) for name, each in losses.items() if len(each) > 1},
                rates=rates,
                runs=found,
            )
        if arm.way.answers:
            idle = max(run["idle"] for run in found[arm.arm])
            report.add(Ratio(f"{arm.arm}: waiting for scores", idle, "the run's time", 0.1))
