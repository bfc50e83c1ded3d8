import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.clock import Clock
from trainer.system.errors import StorageError
from trainer.tracking.status import Status, StatusFile, read_status, say_last, says_over


def status(**changes: Any) -> Status:
    values: Any = {
        "run_id": "demo-1",
        "state": "running",
        "reason": None,
        "exit_code": None,
        "pid": 42,
        "step": 1,
        "total_steps": 100,
        "epoch": 0,
        "loss": 1.25,
        "learning_rate": 1e-4,
        "tokens_per_second": 900.0,
        "exchange_ms": 12.0,
        "exchange_exposed_ms": 2.0,
        "generation": 1,
        "expect_workers": 1,
        "workers": [
            {
                "rank": 0,
                "host": "lambda",
                "device": "cpu",
                "backend": "cpu",
                "backend_reason": "",
                "state": "active",
                "samples": 16,
                "step_seconds": 0.2,
                "tokens_per_second": 900.0,
            }
        ],
        "checkpoint": None,
        "validation": None,
    }
    values.update(changes)
    return values


def test_schema_and_time_are_added(tmp_path: Path):
    file = StatusFile(tmp_path / "new")
    assert file.write_if_due(status())
    read = read_status(file.path)
    assert read["schema"] == "motley.status/2"
    assert read["updated"] > 1_600_000_000
    assert {k: v for k, v in read.items() if k not in ("schema", "updated")} == status()
    assert [path.name for path in file.path.parent.iterdir()] == ["status.json"]


def test_moving_numbers_wait_and_changes_of_state_do_not(tmp_path: Path):
    clock = Clock()
    file = StatusFile(tmp_path, interval=0.5, clock=clock)
    assert file.write_if_due(status(step=1))
    assert not file.write_if_due(status(step=2, loss=1.0))
    clock.now = 0.6
    assert file.write_if_due(status(step=3))
    assert not file.write_if_due(status(step=4))
    assert file.write_if_due(status(step=4, state="stopping", reason="SIGTERM"))
    assert file.write_if_due(status(step=4, state="stopping", reason="SIGTERM"), force=True)


def test_a_worker_changing_in_place_is_a_change_of_state(tmp_path: Path):
    clock = Clock()
    file = StatusFile(tmp_path, clock=clock)
    current = status()
    file.write_if_due(current)
    current["workers"][0]["samples"] = 3
    assert not file.write_if_due(current)
    current["workers"][0]["state"] = "lost"
    assert file.write_if_due(current)
    assert read_status(file.path)["workers"][0]["state"] == "lost"


def test_nan_is_null(tmp_path: Path):
    file = StatusFile(tmp_path)
    file.write_if_due(status(loss=math.nan, tokens_per_second=-math.inf))
    assert read_status(file.path)["loss"] is None
    assert read_status(file.path)["tokens_per_second"] is None


def test_a_failing_disk_is_one_alarm(tmp_path: Path):
    (tmp_path / "file").write_text("")
    alarms: list[str] = []
    file = StatusFile(tmp_path / "file", on_alarm=alarms.append)
    assert not file.write_if_due(status())
    assert not file.write_if_due(status(), force=True)
    assert len(alarms) == 1
    assert "\n" not in alarms[0]
    (tmp_path / "file").unlink()
    assert file.write_if_due(status())


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"schema": "motley.status/9"})])
def test_reading_something_else_is_one_line(tmp_path: Path, content: str):
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(StorageError, match=r"status\.json"):
        read_status(tmp_path / "status.json")
    with pytest.raises(StorageError, match="cannot be read"):
        read_status(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("state", "exit_code", "over"),
    [
        ("running", None, False),
        ("completed", 0, True),
        ("stopped", 0, True),
        ("failed", 2, True),
        ("failed", 5, True),
        ("failed", 3, False),
        ("failed", 7, False),
    ],
)
def test_an_attempt_that_failed_is_not_the_end_of_its_run(
    tmp_path: Path, state: str, exit_code: int | None, over: bool
):
    file = StatusFile(tmp_path)
    assert not says_over(file.path)
    file.write_if_due(status(state=state, exit_code=exit_code))
    assert says_over(file.path) == over


def test_an_end_before_the_beginning_never_replaces_another_runs_word(tmp_path: Path):
    say_last(tmp_path, status(state="failed", exit_code=4))
    assert says_over(tmp_path / "status.json")
    say_last(tmp_path, status(run_id="another", state="failed", exit_code=2))
    assert read_status(tmp_path / "status.json")["run_id"] == "demo-1"
    say_last(tmp_path, status(state="failed", exit_code=2))
    assert read_status(tmp_path / "status.json")["exit_code"] == 2
