"""The same run without any fault: one process, no network, the same seed and settings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import yaml

from tests.soak.cluster import SoakCluster
from trainer.tracking.metrics import METRICS_FILE, read_metrics

_LOOK = 0.2
_SLOWEST_STEP = 2.0
"""Seconds for a step, on a machine that has others to look after."""


class ReferenceRunError(Exception):
    """The undisturbed run did not come as far as the disturbed one."""


def undisturbed_losses(cluster: SoakCluster, steps: int) -> list[float]:
    """Return the losses of at least so many steps of `trainer finetune --role local`.

    Of rounds, each is the mean of as many steps, one after the other.
    """
    inner = cluster.inner_steps
    folder = cluster.folder / "reference"
    folder.mkdir()
    tree = yaml.safe_load(cluster.run_file.read_text())
    tree["output"] = str(folder)
    tree["checkpoint"] = {"every": 1_000_000}
    del tree["exchange"]
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(tree))
    trainer = str(Path(sys.executable).with_name("trainer"))
    flags = ["--run-id", "reference", "--threads", "1", "--gpu-backend", "cpu"]
    command = [trainer, "finetune", "--config", str(run_file), *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdout=log,
            stderr=log,
        )
        try:
            _wait_for_step(folder / METRICS_FILE, steps * inner, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    records = read_metrics(folder / METRICS_FILE)
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    return [fmean(losses[at : at + inner]) for at in range(0, len(losses) - inner + 1, inner)]


def _wait_for_step(metrics: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120 + step * _SLOWEST_STEP
    while _last_step(metrics) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            log = metrics.with_name("log")
            raise ReferenceRunError(f"the undisturbed run ended before step {step}: see {log}")
        time.sleep(_LOOK)


def _last_step(metrics: Path) -> int:
    """Return the step of the last whole line; 0 when there is none."""
    try:
        with metrics.open("rb") as stream:
            stream.seek(max(0, metrics.stat().st_size - 4096))
            lines = stream.read().split(b"\n")[1:-1]
    except FileNotFoundError:
        return 0
    return json.loads(lines[-1]).get("step", 0) if lines else 0
