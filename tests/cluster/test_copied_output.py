"""A run resumes from an output folder that was copied here, and from no other folder."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.real_process import Process
from tests.cluster.stand_in_cluster import Cluster, cluster
from tests.trainer.small_model import write_data, write_model
from tests.waiting import wait_for
from trainer.tracking.metrics import read_metrics

pytestmark = pytest.mark.cluster
__all__ = ["cluster"]
RUN = "began-elsewhere"


def train(folder: Path, name: str, *words: str) -> Process:
    command = [sys.executable, "-m", "trainer", "finetune", *words, "--run-id", RUN]
    return Process(name, command, folder, {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"})


@pytest.fixture
def elsewhere(cluster: Cluster, tmp_path: Path) -> Path:
    """Return the output folder of a run that another machine began and stopped."""
    model = write_model(tmp_path / "own", write_data(cluster.data, classes=5))
    output = tmp_path / "elsewhere"
    settings = ("--set", "training.max_steps=100000", "--set", "checkpoint.every=4")
    words = (str(model), "--data", str(cluster.data), "-o", str(output), *settings)
    began = train(tmp_path, "began", *words)
    wait_for(lambda: (output / "checkpoints/latest").exists(), "a checkpoint")
    began.signal(signal.SIGTERM)
    assert began.wait() == 0, began.text
    return output


@pytest.fixture
def real(cluster: Cluster) -> Cluster:
    """Return a cluster of the real trainer."""
    tree = json.loads(cluster.inventory.read_text())
    del tree["all"]["hosts"]["localhost"]["motley_trainer_command"]
    cluster.inventory.write_text(json.dumps(tree))
    cluster.environment["MOTLEY_INVENTORY"] = str(cluster.inventory)
    return cluster


def step_of(output: Path) -> int:
    return json.loads((output / "status.json").read_bytes())["step"]


@pytest.mark.long
def test_a_copied_output_folder_resumes_by_its_config_and_id(
    real: Cluster, elsewhere: Path, tmp_path: Path
) -> None:
    stopped_at = step_of(elsewhere)
    copy = tmp_path / "copy"
    shutil.copytree(elsewhere, copy, symlinks=True)
    there = (elsewhere / "metrics.jsonl").read_bytes()
    resume = ("cluster", "up", "-n", "1", "--config", str(copy / "run.yaml"), "-o", str(copy))

    shutil.rmtree(real.output / "checkpoints", ignore_errors=True)
    empty = real.launch(*resume[:-1], str(real.output), "--resume", RUN)
    assert empty.returncode == 2
    assert f"--resume {RUN}: {real.output}/checkpoints contains no checkpoints" in empty.stderr
    other = real.launch(*resume, "--resume", "another-run")
    assert other.returncode == 4
    assert f"{copy} contains the checkpoints of run {RUN}" in other.stderr
    odd = real.launch(*resume, "--resume", "../copy")
    assert (odd.returncode, odd.stderr) == (2, "launch: --resume ../copy: is not a run id\n")
    assert real.runs() == []

    started = real.launch(*resume, "--resume", RUN)
    assert started.returncode == 0, started.stderr
    assert f"resuming {RUN} from {copy}/checkpoints" in started.stderr
    assert real.runs() == [RUN]
    wait_for(lambda: step_of(copy) > stopped_at, "a step after the last one")
    assert real.launch("cluster", "down").returncode == 0
    resumed = [one for one in read_metrics(copy / "metrics.jsonl") if one.get("event") == "resumed"]
    assert [one["step"] for one in resumed] == [stopped_at]
    assert (elsewhere / "metrics.jsonl").read_bytes() == there

    known = real.launch(*resume, "--resume", RUN)
    assert known.returncode == 2
    assert f"--resume {RUN} uses its own config; leave out --preset and --config" in known.stderr


@pytest.mark.long
def test_a_copy_resumes_by_hand_and_only_with_its_own_data_and_model(
    elsewhere: Path, cluster: Cluster, tmp_path: Path
) -> None:
    stopped_at = step_of(elsewhere)
    copy = tmp_path / "copy"
    shutil.copytree(elsewhere, copy, symlinks=True)
    words = ("--config", str(copy / "run.yaml"), "-o", str(copy))

    data = tmp_path / "other.jsonl"
    model = write_model(tmp_path / "other", write_data(data, classes=5), seed=1)
    data.write_text(data.read_text() + data.read_text().splitlines()[0] + "\n")
    for name, more, says in (
        ("data", ("--data", str(data)), "its data has changed"),
        ("model", ("--set", f"model.path={model}"), "its model has changed"),
        ("rate", ("--learning-rate", "0.5"), "its settings have changed (optimizer.learning_rate"),
        ("absent", ("--set", "model.path=/nowhere"), "/nowhere"),
    ):
        refused = train(tmp_path, name, *words, *more)
        assert refused.wait() == 2, refused.text
        assert says in refused.text.splitlines()[-1]
    assert step_of(copy) == stopped_at

    again = train(tmp_path, "again", *words)
    wait_for(lambda: step_of(copy) > stopped_at, "a step after the last one")
    again.signal(signal.SIGTERM)
    assert again.wait() == 0, again.text
    assert step_of(elsewhere) == stopped_at
