"""A teacher and a student that die in turn, each at any moment, and are started again.

One distillation after the other, also on answers of the student's own, until the time is over. All
are the same, so the losses of each must be those of the first, in which no process is killed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launcher.session.processes import RUN_VARIABLE, describe_process, find_run
from tests.soak import checks
from tests.soak.checks import Check
from tests.soak.faults import Injection
from tests.soak.report import Report
from tests.soak.schedule import Fault
from tests.trainer.small_teacher import SIZES, write_corpus, write_teacher
from trainer.checkpoint.reader import FOLDER as CHECKPOINTS
from trainer.checkpoint.reader import complete_checkpoints, read_run
from trainer.distill.answers.student_answers import ON_POLICY, RoundsFolder
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.shard_folder import verify_shards
from trainer.init_model import init_model
from trainer.tracking.metrics import read_metrics

ROLES = ("teacher", "student")
STEPS, TEXTS, ANSWERS, KEEP_LAST = 24, 3, 2, 2
"""Steps of a distillation; a step's samples of the corpus, and those that are answers."""
_ALONE = 900.0
"""Seconds in which a distillation without a death has to be over."""
_LIFE, _LAST_DEATH, _END = (0.02, 0.5), 2.5, 10.0
"""In multiples of the time that it took: until the next death, which may be in the middle of a
start; until the last death; and the longest that a distillation may take."""


def soak(folder: Path, seed: int, minutes: float, say: Callable[[str], None]) -> Report:
    """Run distillations until the time is over, leave nothing running, return what was found."""
    began, draw = time.monotonic(), random.Random(f"distillation {seed}")
    undisturbed = Distillation(folder / "undisturbed")
    found = undisturbed.run(None, began, _ALONE / _END)
    alone = time.monotonic() - began
    deadline = time.monotonic() + 60 * minutes
    say(f"{STEPS} steps without a death took {alone:.0f} s")
    injections: list[Injection] = []
    steps = ever = 0
    while all(check.passed for check in found) and time.monotonic() < deadline:
        each = Distillation(folder / f"after-{len(injections)}-deaths")
        found = each.run(draw, deadline, alone)
        found.append(checks.loss(each.losses(), undisturbed.losses(), 1))
        injections += [Injection(fault, fault.at, fault.at) for fault in each.deaths]
        steps, ever = steps + len(each.losses()), ever + len(each.losses(abandoned=True))
        say(f"{len(injections)} deaths, {steps} steps")
        if all(check.passed for check in found):
            shutil.rmtree(each.folder)
    died = {injection.fault.target for injection in injections}
    return Report(
        seed=seed,
        seconds=time.monotonic() - began,
        steps=steps,
        taken_back=ever - steps,
        injections=injections,
        recoveries=[],
        checks=[Check("faults", died == {*ROLES}, f"{len(injections)} deaths"), *found],
        usage={},
        folder=str(folder),
    )


class Distillation:
    """One distillation below a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.deaths = folder, list[Fault]()
        self._logits, self._output = folder / "logits", folder / "output"
        folder.mkdir()
        corpus, prompts = write_corpus(folder / "texts.jsonl", 80), folder / "prompts.jsonl"
        teacher = write_teacher(folder / "teacher", corpus, head_scale=10.0)
        student = init_model(corpus, folder / "student", SIZES, seed=5)
        prompts.write_text("".join(json.dumps({"text": f"def f{n}"}) + "\n" for n in range(9)))
        own = {"max_new_tokens": 8, "staleness": 1, "fraction": ANSWERS / (TEXTS + ANSWERS)}
        settings = {f"distillation.on_policy.{key}": value for key, value in own.items()} | {
            "distillation.on_policy.prompts": prompts,
            "training.batch_size": TEXTS + ANSWERS,
            "training.max_steps": STEPS,
            "checkpoint.every": 3,
            "checkpoint.keep_last": KEEP_LAST,
        }
        shared = ["--gpu-backend", "cpu", "--threads", "1", "--max-seq-len", "64"]
        scores = ["--dtype", "float32", "--shard-bytes", "900", "--stay"]
        until = ["--until", self._output / "status.json"]
        words = [f"--set={key}={value}" for key, value in settings.items()]
        begins = ["--teacher-logits", self._logits, "--student", student, "-o", self._output]
        self._words: dict[str, list[str | Path]] = {
            "teacher": [teacher, "--data", corpus, "--out", self._logits, *scores, *until, *shared],
            "student": [*begins, *words, *shared],
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, draw: random.Random | None, deadline: float, alone: float) -> list[Check]:
        """Run it to its end, with deaths in turn until the deadline; return what must hold.

        Args:
            draw: of the deaths, of which each role has one at least; None: there are none.
            alone: seconds that it takes without a death.
        """
        began = time.monotonic()
        deadline, end = min(deadline, began + alone * _LAST_DEATH), began + alone * _END
        try:
            for role in ROLES:
                self._start(role)
            while draw and (time.monotonic() < deadline or len(self.deaths) < len(ROLES)):
                if self._ends("student", alone * draw.uniform(*_LIFE)):
                    break
                role = ROLES[len(self.deaths) % len(ROLES)]
                self.deaths.append(Fault(time.monotonic() - began, f"kill {role}", role, 0.0))
                self._kill(role)
                self._start(role)
            over = all(self._ends(role, end - time.monotonic()) for role in ROLES[::-1])
        finally:
            for role in self._processes:
                self._kill(role)
        left = [describe_process(process) for process in find_run(str(self.folder))]
        codes = {role: process.returncode for role, process in self._processes.items()}
        well = Check("kept running", over and not any(codes.values()), f"exit codes {codes}")
        return [well, *(self._checks(left) if well.passed else [])]

    def losses(self, *, abandoned: bool = False) -> list[float]:
        """Return the losses of its steps."""
        records = read_metrics(self._output / "metrics.jsonl", abandoned=abandoned)
        return [record["loss"] for record in records if record["kind"] == "step"]

    def _start(self, role: str) -> None:
        command = [sys.executable, "-m", "trainer.cli", "distill", role, *self._words[role]]
        own = {RUN_VARIABLE: str(self.folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (self.folder / f"{role}.log").open("ab") as log:
            self._processes[role] = subprocess.Popen(
                command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
            )

    def _kill(self, role: str) -> None:
        if self._processes[role].poll() is None:
            os.killpg(self._processes[role].pid, signal.SIGKILL)
        self._processes[role].wait()

    def _ends(self, role: str, seconds: float) -> bool:
        """Return whether a process ends by itself within some seconds."""
        try:
            self._processes[role].wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _checks(self, left: list[str]) -> list[Check]:
        logits, saves = LogitsFolder(self._logits), self._output / CHECKPOINTS
        last = read_run(complete_checkpoints(saves)[0])
        rounds = RoundsFolder(self._logits / ON_POLICY / last["logits_position"]["iterations"])
        records = read_metrics(self._output / "metrics.jsonl")
        steps = [record for record in records if record["kind"] == "step"]
        states = [each for part in (logits, rounds, rounds.answers) for each in verify_shards(part)]
        bad = [
            f"{each.name} {each.reason or each.state}" for each in states if each.state != "whole"
        ]
        numbers = [plan.number for plan in rounds.plans]
        if numbers != [*range(STEPS)]:
            bad.append(f"the rounds of answers are {numbers}")
        found = f"{len(states)} shards are whole, each token once, each answer once"
        kept = [str(path.relative_to(self.folder)) for path in self.folder.rglob("*")]
        return [
            checks.saved(len(steps), last["step"], 0, ""),
            checks.ledger(steps, logits.description.windows, TEXTS),
            Check("scores", not bad, "; ".join(bad) or found),
            checks.files(kept, [], len([*saves.glob("step-*")]), KEEP_LAST),
            checks.processes(left, listening=False),
        ]
