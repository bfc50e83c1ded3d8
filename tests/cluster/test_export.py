"""A run that begins here, goes on under Slurm, and comes back: one loss curve all the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import run as launch
from tests import ROOT
from tests.cluster.real_process import Process
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for
from trainer.tracking.metrics import read_metrics

pytestmark = pytest.mark.cluster

STEPS = 40
SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "ip")
NAMESPACES = ("--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def losses(output: Path) -> dict[int, float]:
    """Return the last loss of every step."""
    steps = [one for one in read_metrics(output / "metrics.jsonl") if one["kind"] == "step"]
    return {one["step"]: one["loss"] for one in steps}


def in_slurm(state: Path, folder: Path) -> None:
    """Submit the job of an exported folder to a Slurm of its own, and wait for its end."""
    state.mkdir()
    command = ["unshare", *NAMESPACES, "sh", str(ROOT / "tests/cluster/slurm.sh")]
    path = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, str(state), str(folder)], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    said = "".join(log.read_text() for log in [*folder.glob("slurm-*.log"), *state.glob("*.log")])
    assert done.returncode == 0, done.stdout + done.stderr + said


def trains_alone(folder: Path, name: str, *more: str) -> Process:
    """Start the run of an exported folder as one process in it."""
    environment = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "trainer", "finetune", "--config", "run.yaml", *more]
    return Process(name, command, folder, environment)


@pytest.mark.needs(*SLURM)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_goes_to_slurm_and_comes_back_with_one_loss_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    data = write_data(tmp_path / "data.jsonl")
    model = write_model(tmp_path / "model", data)
    described = ("--model", str(model), "--data", str(data), "-o", str(tmp_path / "home"))
    settings = ("--set", f"training.max_steps={STEPS}", "--set", "checkpoint.every=4")
    to = ("--to", "torchrun", "--target", "1 node x 1 CPU")
    assert launch(["export", *to, *described, *settings, "--into", "first", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    run_id = made["run_id"]

    # It begins in one process, and is asked to end after some steps.
    began = trains_alone(tmp_path / "first", "began", "--run-id", run_id)
    wait_for(lambda: (tmp_path / "first/output/checkpoints/latest").exists(), "a checkpoint")
    began.signal(signal.SIGTERM)
    assert began.wait() == 0, began.text
    assert launch(["import-run", "first"]) == 0, capsys.readouterr().err
    done = max(losses(tmp_path / "home"))
    assert f"run {run_id}: stopped at step {done}" in capsys.readouterr().out
    assert 4 <= done < STEPS

    to = ("--to", "slurm", "--target", "2 nodes x 2 CPU")
    assert launch(["export", *to, "--run", run_id, "--into", "rack", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == done
    in_slurm(tmp_path / "slurm", tmp_path / "rack")
    rack = tmp_path / "rack/output/metrics.jsonl"
    told = [one for one in read_metrics(rack) if one.get("event") == "resumed"]
    assert [one["step"] for one in told] == [done]

    assert launch(["import-run", "rack"]) == 0
    capsys.readouterr()
    assert launch(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["run_id"], one["state"]) for one in listed] == [(run_id, "completed")]
    assert (tmp_path / f"home/checkpoints/step-{STEPS:06}").is_dir()

    alone = trains_alone(tmp_path / "first", "alone", "-o", str(tmp_path / "alone"))
    assert alone.wait() == 0, alone.text
    expected, found = losses(tmp_path / "alone"), losses(tmp_path / "home")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
