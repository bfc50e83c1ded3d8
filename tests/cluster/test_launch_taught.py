"""`launch` with a run that learns from a teacher: real trainers, from doctor to the last step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from launcher.session.processes import find_run
from tests.cluster.real_cluster import Bench
from tests.forked import run
from tests.ports import free_port
from trainer.distill.logits.dataset import LogitsFolder
from trainer.tracking.metrics import read_metrics

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

STEPS = 6


class Lesson:
    """A teacher's logits, a job that learns from them, and `launch` on two CPUs of this machine."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.logits = LogitsFolder(folder / "logits")
        self.output = folder / "output"
        self.environment = os.environ | {"MOTLEY_STATE_DIR": str(folder / "state"), "NO_COLOR": "1"}
        teacher = ["distill", "teacher", str(bench.model), "--data", str(bench.validation)]
        teacher += ["--out", str(self.logits.path), "--top-k", "8", "--max-seq-len", "64"]
        teacher += ["--dtype", "float32", "--threads", "1", "--shard-bytes", "1024"]
        self._run("trainer.cli", *teacher)
        host = {
            "ansible_connection": "local",
            "motley_devices": [{"backend": "cpu"}],
            "motley_fill_with_cpu": True,
            "motley_port": free_port(),
        }
        self._inventory = folder / "hosts.yml"
        self._inventory.write_text(yaml.safe_dump({"all": {"hosts": {"localhost": host}}}))
        self._job = folder / "job.yml"
        self._job.write_text(
            yaml.safe_dump(
                {
                    "name": "taught",
                    "task": "causal-lm",
                    "output": str(self.output),
                    "model": {"path": str(bench.model)},
                    "data": {"train": str(self.logits.path), "max_seq_len": 64},
                    "training": {"batch_size": 8, "max_steps": STEPS},
                }
            )
        )

    def launch(self, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command about the job with two workers."""
        flags = ["--inventory", str(self._inventory), "--config", str(self._job), "-n", "2"]
        return self._run("launcher.cli", *command, *flags, status=status)

    def down(self) -> None:
        self._run("launcher.cli", "cluster", "down", "--all")

    def _run(self, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = run([sys.executable, "-m", *command], self.environment)
        assert done.returncode == status, f"{command}: {done.stdout}{done.stderr}"
        return done


@pytest.fixture
def lesson(bench: Bench, tmp_path: Path) -> Iterator[Lesson]:
    made = Lesson(bench, tmp_path)
    yield made
    made.down()


@pytest.mark.long
def test_from_doctor_to_the_last_step(lesson: Lesson) -> None:
    unsaid = lesson.launch("cluster", "up", status=4)
    assert "add it: --set distillation.alpha=0.7" in unsaid.stderr
    taught = ["--set", "distillation.alpha=0.7"]
    shards = len(lesson.logits.description.shards)
    aside = lesson.logits.shard_path(1).rename(lesson.logits.path / "aside")
    torn = lesson.launch("cluster", "up", *taught, status=4)
    assert f"1 of {shards} shards are missing or damaged, such as shard-00001" in torn.stderr
    aside.rename(lesson.logits.shard_path(1))
    assert f"{shards} shards of a teacher's logits" in lesson.launch("doctor", *taught).stdout

    tree = json.loads(lesson.launch("cluster", "up", "--wait", "--json", *taught).stdout)
    assert (tree["state"], tree["live"]) == ("completed", False)
    assert {process["state"] for process in tree["processes"]} == {"exited"}
    records = read_metrics(lesson.output / "metrics.jsonl")
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert find_run(tree["run_id"]) == []
