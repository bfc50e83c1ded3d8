"""The soak as it is called: a short one with every kind of fault, and one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.soak import run
from tests.soak.__main__ import soak
from tests.soak.checks import Check
from tests.soak.report import Report
from tests.soak.schedule import KINDS


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_short_soak_loses_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "soak"
    flags = ["--minutes", "0.75", "--faults", "16", "--seed", "7", "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *flags], capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    tree = json.loads((folder / "report.json").read_text())
    assert tree["passed"]
    assert {fault["kind"] for fault in tree["faults"]} == set(KINDS) - set(tree["left_out"])
    assert [path for path in folder.iterdir() if path.is_dir()] == []


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_a_teacher_and_a_student_that_die_in_turn_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "soak"
    flags = ["--distill", "--minutes", "0.5", "--seed", "7", "--folder", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", *flags], capture_output=True, text=True
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    tree = json.loads((folder / "report.json").read_text())
    assert tree["passed"]
    assert {fault["target"] for fault in tree["faults"]} == {"teacher", "student"}
    assert [path for path in folder.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("passed", [True, False])
def test_a_failed_check_is_the_exit_code_and_keeps_the_folder(
    passed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(
        folder: Path, seed: int, minutes: float, count: int, say: object, exchange: str
    ) -> Report:
        (folder / "output").mkdir()
        return Report(
            seed=seed,
            seconds=60 * minutes,
            steps=10,
            taken_back=0,
            injections=[],
            recoveries=[],
            usage={},
            checks=[Check("ledger", passed, "step 3 is missing")],
            folder=str(folder),
        )

    monkeypatch.setattr(run, "soak", fake)
    folder = tmp_path / "soak"
    folder.mkdir()
    done = CliRunner().invoke(soak, ["--seed", "3", "--folder", str(folder)])
    assert done.exit_code == (0 if passed else 1)
    assert json.loads((folder / "report.json").read_text())["passed"] is passed
    assert (folder / "output").exists() is not passed
    assert (f"logs, metrics and report.json: {folder}" in done.stdout) is not passed


def test_a_folder_that_is_not_of_a_soak_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    done = CliRunner().invoke(soak, ["--folder", str(tmp_path)])
    assert done.exit_code == 1
    assert "is not of a soak" in done.output
    assert (tmp_path / "thesis.tex").exists()
