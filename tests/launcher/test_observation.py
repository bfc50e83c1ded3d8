"""The run's state from what its coordinator did and said."""

import json
from pathlib import Path

import pytest

from launcher.access import LocalConnection
from launcher.inventory import Host
from launcher.observation import derive_state, read_training
from launcher.placement import Setting, place
from launcher.plan import LaunchPlan
from launcher.supervisor import ProcessState
from trainer.config import load


@pytest.mark.parametrize(
    ("process", "said", "state"),
    [
        ("absent", None, "stopped"),
        ("starting", None, "starting"),
        ("running", None, "starting"),
        ("running", "waiting", "starting"),
        ("running", "running", "running"),
        ("running", "stopping", "stopping"),
        ("running", "finished", "stopping"),
        ("running", "failed", "stopping"),
        ("stopping", "running", "stopping"),
        ("backoff", "running", "recovering"),
        ("exited", "finished", "finished"),
        ("exited", "failed", "failed"),
        ("exited", "stopping", "stopped"),
        ("stopped", "running", "stopped"),
        ("stopped", "finished", "finished"),
        ("failed", "running", "failed"),
        ("failed", None, "failed"),
        ("lost", "running", "failed"),
    ],
)
def test_the_state_of_a_run(process: str, said: str | None, state: str) -> None:
    training = None if said is None else {"state": said}
    assert derive_state(ProcessState(state=process), training) == state


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:

    host = Host(name="localhost", connection="local", fill_with_cpu=True, devices=())
    setting = Setting(run_id="run-1", trainer_command=("t",), state_folder="/s", routes={})
    return place([host], load("quickstart", {"output": str(tmp_path)}), 1, setting)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        (json.dumps({"run_id": "run-1", "updated": 100.0}), True),
        (json.dumps({"run_id": "run-1", "updated": 99.0}), False),
        (json.dumps({"run_id": "run-2", "updated": 101.0}), False),
        ("[1]", False),
        ("torn {", False),
        ("", False),
    ],
)
def test_only_what_this_attempt_of_this_run_wrote_counts(
    tmp_path: Path, plan: LaunchPlan, text: str, counts: bool
) -> None:
    (tmp_path / "status.json").write_text(text)
    assert (read_training(LocalConnection(), plan, 100.0) is not None) == counts


def test_no_status_yet(plan: LaunchPlan) -> None:
    assert read_training(LocalConnection(), plan, None) is None
