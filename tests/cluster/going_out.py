"""A run that begins here, goes on in a Slurm, and comes back: one loss curve all the way."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import run as launch
from tests.cluster.real_process import Process
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for
from trainer.tracking.metrics import read_metrics

STEPS = 40


def losses(output: Path) -> dict[int, float]:
    """Return the last loss of every step."""
    steps = [one for one in read_metrics(output / "metrics.jsonl") if one["kind"] == "step"]
    return {one["step"]: one["loss"] for one in steps}


def trains_alone(folder: Path, name: str, *more: str) -> Process:
    """Start the run of an exported folder as one process in it."""
    environment = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "trainer", "finetune", "--config", "run.yaml", *more]
    return Process(name, command, folder, environment)


def check_one_loss_curve(
    folder: Path,
    target: str,
    submit: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Begin a run in one process, have it go on in Slurm, bring it home, and compare its losses.

    Args:
        folder: an empty one, for all of it.
        target: for `launch export --target`.
        submit: runs the job of an exported folder to its end, with the results in the folder.
    """
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(folder / "state"))
    monkeypatch.chdir(folder)
    data = write_data(folder / "data.jsonl")
    model = write_model(folder / "model", data)
    described = ("--model", str(model), "--data", str(data), "-o", str(folder / "home"))
    settings = ("--set", f"training.max_steps={STEPS}", "--set", "checkpoint.every=4")
    to = ("--to", "torchrun", "--target", "1 node x 1 CPU")
    assert launch(["export", *to, *described, *settings, "--into", "first", "--json"]) == 0
    run_id = json.loads(capsys.readouterr().out)["run_id"]

    # It begins in one process, and is asked to end after some steps.
    began = trains_alone(folder / "first", "began", "--run-id", run_id)
    wait_for(lambda: (folder / "first/output/checkpoints/latest").exists(), "a checkpoint")
    began.signal(signal.SIGTERM)
    assert began.wait() == 0, began.text
    assert launch(["import-run", "first"]) == 0, capsys.readouterr().err
    done = max(losses(folder / "home"))
    assert f"run {run_id}: stopped at step {done}" in capsys.readouterr().out
    assert 4 <= done < STEPS

    (wheel,) = (folder / "first").glob("*.whl")
    to = ("--to", "slurm", "--target", target, "--wheel", str(wheel))
    assert launch(["export", *to, "--run", run_id, "--into", "rack", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == done
    submit(folder / "rack")
    rack = folder / "rack/output/metrics.jsonl"
    told = [one for one in read_metrics(rack) if one.get("event") == "resumed"]
    assert [one["step"] for one in told] == [done]

    assert launch(["import-run", "rack"]) == 0
    capsys.readouterr()
    assert launch(["runs", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["run_id"], one["state"]) for one in listed] == [(run_id, "completed")]
    assert (folder / f"home/checkpoints/step-{STEPS:06}").is_dir()

    alone = trains_alone(folder / "first", "alone", "-o", str(folder / "alone"))
    assert alone.wait() == 0, alone.text
    expected, found = losses(folder / "alone"), losses(folder / "home")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
