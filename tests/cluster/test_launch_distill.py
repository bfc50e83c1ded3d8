"""`launch distill up` on this machine: real teacher, student and evaluator, and what kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.session.processes import find_run
from tests.forked import run
from tests.trainer.small_teacher import write_corpus, write_teacher
from tests.waiting import wait_for
from trainer.tracking.metrics import read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LAUNCH = [sys.executable, "-m", "launcher.cli"]
PATIENCE = 400.0
"""Seconds: three processes load torch on the cores of one machine."""


class Distillation:
    """A job, and the `launch` command with a state folder of its own."""

    def __init__(self, folder: Path, inputs: Path) -> None:
        self.folder = folder
        self.job = folder / "job.yaml"
        self.tree: dict[str, Any] = {
            "name": "tiny",
            "logits": str(folder / "logits"),
            "teacher": {
                "model": str(inputs / "teacher"),
                "data": [str(inputs / "corpus.jsonl")],
                "top_k": 8,
                "tail_samples": 4,
                "max_seq_len": 64,
                "shard_bytes": 2000,
            },
            "student": {
                "model": str(inputs / "student"),
                "output": str(folder / "output"),
                "training": {"batch_size": 8},
                "checkpoint": {"every": 50, "keep_last": 100},
            },
            "evaluation": {"data": [str(inputs / "held-out.jsonl")], "every": 0.5},
        }
        self.environment = os.environ | {
            "MOTLEY_STATE_DIR": str(folder / "state"),
            "NO_COLOR": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def launch(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = run([*LAUNCH, *arguments], self.environment, PATIENCE)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done

    def up(self, *flags: str, **training: int) -> dict[str, Any]:
        """Start; keywords are settings of the student's training."""
        self.tree["student"]["training"] |= training
        self.job.write_text(yaml.safe_dump(self.tree))
        arguments = ["distill", "up", "--config", str(self.job), "--json", *flags]
        return json.loads(self.launch(*arguments).stdout)

    @property
    def status(self) -> dict[str, Any]:
        return json.loads(self.launch("status", "--json").stdout)

    def process(self, name: str) -> dict[str, Any]:
        return next(p for p in self.status["processes"] if p["name"] == name)

    def steps(self) -> list[int]:
        """Return the steps that count, without those of futures that were abandoned."""
        path = self.folder / "output" / "metrics.jsonl"
        records = read_metrics(path) if path.exists() else []
        return [record["step"] for record in records if record["kind"] == "step"]

    def events(self) -> list[dict[str, Any]]:
        records = read_metrics(self.folder / "output" / "metrics.jsonl")
        return [record for record in records if record["kind"] == "event"]

    def wait(self, ready: Callable[[], Any], what: str) -> Any:
        return wait_for(ready, what, self, PATIENCE)

    def wait_end(self) -> dict[str, Any]:
        """Wait until all have left, and return the last status."""
        (state,) = (self.folder / "state" / "runs").iterdir()
        self.wait(lambda: not find_run(state.name), "the end")
        return self.wait(lambda: tree if not (tree := self.status)["live"] else None, "the end")

    def logs(self) -> str:
        return self.launch("logs", "--tail", "25", check=False).stdout

    def check_whole(self, run_id: str, total: int) -> None:
        """Check the ledger of documents, the steps, and that each checkpoint was scored once."""
        verify = [sys.executable, "-m", "trainer.cli", "distill", "verify", self.tree["logits"]]
        done = run(verify, self.environment, PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.steps() == list(range(1, total + 1))
        output = self.folder / "output"
        kept = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
        assert kept[-1] == f"step-{total:06d}"
        lines = (output / "evaluations" / "evaluations.jsonl").read_text().splitlines()
        scored = [json.loads(line)["checkpoint"] for line in lines]
        assert set(kept) <= set(scored)  # and what was pruned meanwhile
        assert len(scored) == len(set(scored))
        assert find_run(run_id) == []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a corpus of 120 documents, its teacher, and a student with the same tokenizer."""
    folder = tmp_path_factory.mktemp("inputs")
    corpus = write_corpus(folder / "corpus.jsonl", 120)
    write_corpus(folder / "held-out.jsonl", 8)
    write_teacher(folder / "teacher", corpus)
    write_teacher(folder / "student", corpus, seed=1, head_scale=1.0)
    return folder


@pytest.fixture
def distillation(tmp_path: Path, inputs: Path) -> Iterator[Distillation]:
    made = Distillation(tmp_path, inputs)
    yield made
    print(made.logs())
    made.launch("cluster", "down", "--all", check=False)


@pytest.mark.long
def test_whatever_ends_them_they_go_on_to_the_last_score(distillation: Distillation) -> None:
    """A killed teacher and a killed student by themselves, all of them after `down` or the budget.

    A euro a second: what a student keeps back for an end in order is 30 euros.
    """
    prices = ("-e", "motley_price_hour=3600", "-e", "motley_currency=EUR")
    distillation.tree["budget"] = {"ceiling": 1e6, "currency": "EUR"}
    # Until `down`:
    begun = distillation.up(*prices, max_steps=1_000_000, epochs=100_000)
    run_id = begun["run_id"]
    where = {p["name"]: (p["role"], p["host"]) for p in begun["processes"]}
    assert where == {
        "student": ("student", "localhost"),
        "teacher-0": ("teacher", "localhost"),
        "evaluator-0": ("evaluator", "localhost"),
    }
    assert begun["state"] in ("waiting", "running")
    says = distillation.process("teacher-0")["report"]
    assert (says["name"], says["state"] in ("running", "waiting", "done")) == ("teacher-0", True)
    second = ("distill", "up", "--config", str(distillation.job), *prices)
    busy = distillation.launch(*second, check=False)
    assert busy.returncode == 4, busy.stderr
    assert run_id in busy.stderr
    os.kill(distillation.process("teacher-0")["pid"], signal.SIGKILL)
    distillation.wait(lambda: len(distillation.steps()) > 60, "a checkpoint")
    os.kill(distillation.process("student")["pid"], signal.SIGKILL)

    def both_are_back() -> bool:
        states = {p["name"]: (p["state"], p["attempt"]) for p in distillation.status["processes"]}
        return [states[name] for name in ("student", "teacher-0")] == [("running", 2)] * 2

    distillation.wait(both_are_back, "the second attempts")
    resumed = distillation.wait(
        lambda: [event for event in distillation.events() if event["event"] == "resumed"],
        "the second student",
    )
    distillation.wait(lambda: len(distillation.steps()) > resumed[0]["step"] + 5, "more steps")

    told = distillation.launch("cluster", "down").stdout
    assert "no process is left" in told
    assert find_run(run_id) == []
    wrong = distillation.launch("cluster", "up", "--resume", run_id, check=False)
    assert (wrong.returncode, f"launch distill up --resume {run_id}" in wrong.stderr) == (2, True)
    spent = distillation.status["training"]["budget"]["spent"]
    up = ("distill", "up", "--resume", run_id, *prices)

    # The steps that are left take more than the 31 seconds that it would pay for.
    low = ("--set", f"budget.ceiling={spent + 31}")
    dear = distillation.launch(*up, *low, check=False)
    assert dear.returncode == 7, dear.stderr
    assert f"{spent:.2f} EUR were spent, and " in dear.stderr
    assert "EUR are planned for" in dear.stderr
    # A thousand do not: enough to start, not enough to end in order half a minute later.
    few = ("--set", f"student.training.max_steps={len(distillation.steps()) + 1000}")
    done = distillation.launch(*up, *low, *few, check=False)
    assert done.returncode in (0, 7), done.stderr  # whether all have joined before
    ended = distillation.wait_end()
    assert (ended["state"], ended["training"]["state"]) == ("stopped", "stopped")
    assert ended["reason"].startswith("budget.ceiling: ")
    (student, *others) = ended["processes"]
    assert student["exit_code"] == 9
    assert {process["state"] for process in others} <= {"exited", "stopped"}

    total = len(distillation.steps()) + 25
    more = ("--set", "budget.ceiling=1e6", "--set", f"student.training.max_steps={total}")
    again = distillation.launch(*up, *more, "--json").stdout
    assert json.loads(again)["run_id"] == run_id
    ended = distillation.wait_end()
    assert (ended["state"], ended["training"]["state"]) == ("completed", "completed")
    assert {process["state"] for process in ended["processes"]} == {"exited"}
    assert f"{run_id}: completed, step {total}/{total}" in distillation.launch("status").stdout
    assert "shard" in distillation.launch("logs", "teacher-0").stdout
    assert run_id in distillation.launch("runs").stdout
    assert distillation.launch("cluster", "down").stdout == "nothing was running\n"
    distillation.check_whole(run_id, total)
    assert not (distillation.folder / "state" / "ca").exists()  # without sockets no certificates
    listed = json.loads(distillation.launch("spend", "--by", "run", "--json").stdout)
    (counted,) = listed["totals"]
    assert counted["name"] == run_id
    assert counted["cost"] == pytest.approx(
        distillation.status["training"]["budget"]["spent"], abs=0.01
    )


def test_a_teacher_that_cannot_begin_is_named(distillation: Distillation, inputs: Path) -> None:
    """Its tokenizer is another model's: preflight cannot see that, `up` waits and finds out."""
    other, text = distillation.folder / "other", distillation.folder / "other.jsonl"
    words = [f"{n} {word}" for word in ("zebra", "quokka", "wombat") for n in range(40)]
    text.write_text("".join(json.dumps({"text": f"the {word} sleeps"}) + "\n" for word in words))
    write_teacher(other, text)
    distillation.tree["teacher"]["tokenizer"] = str(other)
    distillation.job.write_text(yaml.safe_dump(distillation.tree))
    done = distillation.launch("distill", "up", "--config", str(distillation.job), check=False)
    assert done.returncode == 5, done.stderr
    assert "missing: teacher-0 (failed, exit code 4); everything was stopped" in done.stderr
    assert str(other) in done.stderr  # its own words
    assert distillation.launch("cluster", "down").stdout == "nothing was running\n"


def test_a_student_that_is_refused_sends_everybody_home(
    distillation: Distillation, inputs: Path
) -> None:
    """It finds out once the teacher has said what it writes; nobody waits for it then."""
    text = distillation.folder / "other.jsonl"
    text.write_text("".join(json.dumps({"text": f"{n} zebras sleep"}) + "\n" for n in range(99)))
    other = write_teacher(distillation.folder / "other", text)
    distillation.tree["student"]["model"] = str(other)
    distillation.job.write_text(yaml.safe_dump(distillation.tree))
    up = ["distill", "up", "--config", str(distillation.job)]
    assert distillation.launch(*up, check=False).returncode in (0, 6)  # whoever is faster
    ended = distillation.wait_end()
    assert ended["state"] == "failed"
    assert {p["name"]: p["exit_code"] for p in ended["processes"]}["student"] == 4
    assert f"{other}: its tokenizer" in ended["reason"]


@pytest.mark.smoke("refuse")
def test_what_is_missing_is_said_before_anything_starts(distillation: Distillation) -> None:
    distillation.tree["teacher"]["data"] = ["/nowhere/corpus"]
    distillation.job.write_text(yaml.safe_dump(distillation.tree))
    done = distillation.launch("distill", "up", "--config", str(distillation.job), check=False)
    assert done.returncode == 4
    assert "localhost: data: /nowhere/corpus: no such file or folder" in done.stderr
    doctor = distillation.launch(
        "distill", "doctor", "--config", str(distillation.job), check=False
    )
    assert (doctor.returncode, "/nowhere/corpus" in doctor.stdout) == (4, True)
