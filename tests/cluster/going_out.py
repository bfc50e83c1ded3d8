"""A run that begins here, goes on in a Slurm, and continues here: one loss curve all the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli import run as launch
from tests.cluster.real_process import Process
from tests.cluster.stand_in_cluster import LAUNCH
from tests.forked import run
from tests.ports import free_port
from tests.trainer.small_model import write_data, write_model
from trainer.tracking.metrics import read_metrics

HERE, IN_SLURM, STEPS = 8, 40, 44
"""The steps that are done after each part of the run."""


def steps(number: int) -> tuple[str, str]:
    """Return the flags of a run's length."""
    return "--set", f"training.max_steps={number}"


def losses(output: Path) -> dict[int, float]:
    """Return the last loss of every step."""
    steps = [one for one in read_metrics(output / "metrics.jsonl") if one["kind"] == "step"]
    return {one["step"]: one["loss"] for one in steps}


def resumed_at(output: Path) -> list[int]:
    """Return the steps at which a run was resumed."""
    events = read_metrics(output / "metrics.jsonl")
    return [one["step"] for one in events if one.get("event") == "resumed"]


def launched(*words: str) -> str:
    """Return the output of `launch` in a process of its own, which leaves supervisors behind."""
    done = run([*LAUNCH, *words], dict(os.environ))
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_one_loss_curve(
    folder: Path,
    target: str,
    submit: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Begin a run here, have it go on in Slurm, copy its output back, and compare its losses.

    Args:
        folder: an empty one, for all of it.
        target: for `launch export --target`.
        submit: runs the job of an exported folder to its end, with the results in the folder.
    """
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(folder / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(folder)
    data = write_data(folder / "data.jsonl")
    model = write_model(folder / "model", data)
    described = ("--model", str(model), "--data", str(data), "-o", str(folder / "home"))
    # A rate that does not depend on the length of the run, which grows at each place.
    rate = ("--set", "optimizer.scheduler=constant", "--set", "optimizer.warmup_ratio=0")
    here = ("--wait", "-e", f"motley_port={free_port()}", "-n", "1", *described, *rate)
    up = ("cluster", "up", "--json")
    run_id = json.loads(launched(*up, *here, *steps(HERE)))["run_id"]

    to = ("--to", "slurm", "--target", target, *steps(IN_SLURM))
    assert launch(["export", *to, "--run", run_id, "--into", "rack", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == HERE
    submit(folder / "rack")
    assert resumed_at(folder / "rack/output") == [HERE]

    # Its output is copied back by hand, over what is here, and the run goes on by its id.
    subprocess.run(["cp", "-a", "rack/output/.", "home"], check=True)
    launched(*up, "--wait", "--resume", run_id, *steps(STEPS))
    assert resumed_at(folder / "home") == [HERE, IN_SLURM]

    command = [sys.executable, "-m", "trainer", "finetune", "--config", "rack/run.yaml"]
    command += ["-o", str(folder / "alone"), "--data", str(data), "--set", f"model.path={model}"]
    command += steps(STEPS)
    alone = Process("alone", command, folder, {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"})
    assert alone.wait() == 0, alone.text
    expected, found = losses(folder / "alone"), losses(folder / "home")
    assert list(found) == list(expected) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
