"""A test that passed on another machine is left out, and one that was skipped there is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT, passed_elsewhere

TESTS = """
import os
import pytest

@pytest.mark.parametrize("word", ["a b", "c"])
def test_passes(word):
    pass

def test_skipped_there():
    if "THERE" in os.environ:
        pytest.skip("needs root")

def test_fails():
    assert False
"""


def run(folder: Path, **environment: str) -> str:
    """Return what a session printed; its plugins are those of tests/conftest.py."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-v"]
    (folder / "conftest.py").write_text("from tests.conftest import pytest_configure\n")
    (folder / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [*command, "--rootdir", str(folder), "-p", "xdist", "-n1", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_only_what_passed_is_left_out(tmp_path: Path) -> None:
    there, here, passed = tmp_path / "there", tmp_path / "here", tmp_path / "passed"
    there.mkdir()
    here.mkdir()
    run(there, **{passed_elsewhere.NOTE: str(passed), "THERE": "1"})
    named = passed.read_text().splitlines()
    assert sorted(name.partition("::")[2] for name in named) == [
        "test_passes[a b]",
        "test_passes[c]",
    ]
    shown = run(here, **{passed_elsewhere.LEAVE_OUT: str(passed)})
    assert "test_passes" not in shown
    assert "1 failed, 1 passed" in shown
