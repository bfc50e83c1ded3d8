"""What a host knows of its runs by itself."""

import json
from pathlib import Path

import pytest

from launcher.agent.operations import list_unfinished_runs, list_wanted_runs


@pytest.mark.parametrize(
    ("texts", "unfinished"),
    [
        (['{"state": "running"}'], True),
        (['{"state": "exited"}', '{"state": "backoff"}'], True),
        (['{"state": "exited"}', '{"state": "failed"}', '{"state": "stopped"}'], False),
        ([""], True),
        (["torn {"], True),
        ([], False),
    ],
)
def test_a_run_is_unfinished_while_a_process_has_not_ended_for_good(
    tmp_path: Path, texts: list[str], unfinished: bool
) -> None:
    for rank, text in enumerate(texts):
        folder = tmp_path / "runs" / "demo" / "processes" / f"worker-{rank}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(text)
    assert list_unfinished_runs(str(tmp_path)) == (["demo"] if unfinished else [])


def test_runs_are_told_apart(tmp_path: Path) -> None:
    for run_id, state in (("b", "running"), ("a", "running"), ("c", "exited")):
        folder = tmp_path / "runs" / run_id / "processes" / "worker-0"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"state": state}))
    assert list_unfinished_runs(str(tmp_path)) == ["a", "b"]
    assert list_unfinished_runs(str(tmp_path / "absent")) == []


def test_runs_with_units_that_are_started_at_boot(tmp_path: Path) -> None:
    names = ["motley-worker@b-1:worker-0.service", "motley-worker@b-1:worker-12.service"]
    names += ["motley-coordinator@a.2:coordinator.service", "ssh.service"]
    names += ["motley-worker@.service", "other-worker@c:worker-0.service"]
    for name in names:
        (tmp_path / name).symlink_to("/nowhere")
    assert list_wanted_runs(tmp_path) == ["a.2", "b-1"]
    assert list_wanted_runs(tmp_path / "absent") == []
