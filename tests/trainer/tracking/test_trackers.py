"""The trackers, each with its real package and without a network; and what none may do to a run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.trainer.tiny_run import tiny_config
from trainer.run.composition.roles import guard_run
from trainer.system.errors import InputError
from trainer.tracking.trackers.base import Tracker
from trainer.tracking.trackers.table import TRACKERS, Background, open_trackers
from trainer.tracking.trackers.tensorboard_file import TensorBoardFile

RUN = """
import json, sys, time
from pathlib import Path
from tests.trainer.tiny_run import tiny_config
from tests.trainer.tracking.test_metrics import metrics
from trainer.tracking.metrics import MetricsLog
from trainer.tracking.trackers.table import open_trackers

name, output = sys.argv[1], Path(sys.argv[2])
config = tiny_config(name="project", tracking=name)
for attempt, steps in enumerate([(1, 2, 3), (3, 4)]):
    time.sleep(attempt)  # as a process takes to start: wandb names an attempt by its second
    log = MetricsLog(output, [t for t in open_trackers(config, "run-1", output)])
    if attempt:
        log.record_event("resumed", 2, path="step-000002")
    for step in steps:
        log.record_step(metrics(step))
    log.record_validation(steps[-1], loss=0.25, accuracy=0.5, mcc=None)
    for tracker in log._trackers:
        tracker.close(attempt, wait=240.0)
"""

READ = {
    "trackio": """
import json, sqlite3, sys
database = sqlite3.connect(sys.argv[1] + "/trackio/project.db")
rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
told = [(name, step, json.loads(text)) for name, step, text in rows]
print(json.dumps({
    "runs": sorted({name for name, _, _ in told}),
    "loss": [[step, values["loss"]] for _, step, values in told if "loss" in values],
    "accuracy": [v["validation/accuracy"] for _, _, v in told if "validation/accuracy" in v],
}))
""",
    "mlflow": """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{sys.argv[1]}/mlflow.db")
project = client.get_experiment_by_name("project").experiment_id
runs = client.search_runs([project])
assert runs[0].info.status == "FAILED", runs[0].info.status
assert runs[0].data.params["lora.lora_rank"] == "4"
def values(name):
    found = client.get_metric_history(runs[0].info.run_id, name)
    return sorted(([metric.step, metric.value] for metric in found), key=lambda pair: pair[0])
print(json.dumps({
    "runs": [run.info.run_name for run in runs],
    "loss": values("loss"),
    "accuracy": [value for _, value in values("validation/accuracy")],
}))
""",
}


def run(code: str, *arguments: str | Path, folder: Path) -> str:
    """Run Python with an environment that knows of no tracker's account."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "tracking" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_a_tracker_has_the_same_figures_also_of_a_run_that_resumes(
    name: str, tmp_path: Path
) -> None:
    for package in TRACKERS[name].packages:  # pyright: ignore[reportArgumentType] - one of its keys
        pytest.importorskip(package, reason=f"the extra {name} is not installed")
    run(RUN, name, tmp_path, folder=tmp_path)
    found = json.loads(run(READ[name], tmp_path, folder=tmp_path).splitlines()[-1])
    assert found["runs"] == ["run-1"]
    assert found["loss"] == [[1, 1.5], [2, 0.75], [3, 0.5], [3, 0.5], [4, 0.375]]
    assert found["accuracy"] == [0.5, 0.5]


@pytest.mark.long
def test_wandb_is_offline_without_a_key(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    run(RUN, "wandb", tmp_path, folder=tmp_path)
    files = list((tmp_path / "wandb").glob("offline-run-*-run-1/run-run-1.wandb"))
    assert len(files) == 2, "one for each attempt; wandb sync appends the second"
    kept = b"".join(file.read_bytes() for file in files)
    assert kept.count(b"tokens_per_second/rank_1") >= 5
    assert b"validation/accuracy" in kept
    assert b"lora.lora_rank" in kept
    assert b"secret.example" not in kept


class Stand(Tracker):
    """Keeps what it is told, until it is told to fail or to hang."""

    def __init__(self, fails_at: int = 0, hangs: threading.Event | None = None) -> None:
        self.told: list[int] = []
        self._fails_at, self._hangs = fails_at, hangs

    def record_scalars(self, step: int, now: float, values: Mapping[str, float]) -> None:
        if self._hangs is not None:
            self._hangs.wait()
        if step == self._fails_at:
            raise RuntimeError("the server says no\nand more")
        self.told.append(step)


def test_a_tracker_that_fails_is_said_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand(fails_at=2)
    tracker = Background("wandb", lambda: stand)
    for step in range(1, 6):
        tracker.record_scalars(step, 0.0, {"loss": 1.0})
    tracker.close()
    assert stand.told == [1]
    assert [record.message for record in caplog.records] == [
        "tracking wandb: the server says no; it receives no more data (metrics.jsonl has "
        "everything)"
    ]


def test_a_tracker_that_does_not_open_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def opens() -> Tracker:
        raise OSError("no route to it")

    tracker = Background("mlflow", opens)
    tracker.close()
    tracker.record_scalars(1, 0.0, {})
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no route to it" in caplog.text


def test_no_step_waits_for_a_tracker_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    let_go = threading.Event()
    tracker = Background("trackio", lambda: Stand(hangs=let_go))
    for step in range(10_100):  # more than may wait
        tracker.record_scalars(step, 0.0, {})
    tracker.close(wait=0.05)
    let_go.set()
    assert caplog.text.count("is too slow") == 1
    assert "not finished within" in caplog.text


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_package_that_is_missing_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    config = tiny_config(output=str(tmp_path / "output"), tracking=["tensorboard", name])
    with pytest.raises(InputError) as error, guard_run(config, "run"):
        raise AssertionError("not reached")
    assert str(error.value).endswith(f"install the extra: pip install 'motley[{name}]'")
    assert error.value.exit_code == 2


def test_tensorboard_is_the_default_and_none_is_possible(tmp_path: Path) -> None:
    (board,) = open_trackers(tiny_config(), "run", tmp_path)
    assert isinstance(board, TensorBoardFile)
    assert open_trackers(tiny_config(tracking=()), "run", tmp_path) == []
    with pytest.raises(InputError, match="tracking"):
        tiny_config().with_settings({"tracking": ["tensorbord"]})
