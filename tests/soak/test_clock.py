"""A wall clock that jumps while a process runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.clock import ClockError, Clocks

PROGRAM = """
import datetime, sys, time
wall, steady = time.time(), time.monotonic()
print("ready", flush=True)
sys.stdin.readline()
today = datetime.datetime.now(datetime.UTC).timestamp()
print(round((time.time() - wall) / 3600), round((today - wall) / 3600), flush=True)
time.sleep(0.01)
assert time.monotonic() - steady < 1800
sys.stdin.readline()
print(round((time.time() - wall) / 3600), flush=True)
"""


@pytest.mark.needs("cc")
def test_a_clock_that_jumps_and_comes_right(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    clocks.set("worker-1", 0)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | clocks.environment("worker-1"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for hours, seen in ((-2, "-2 -2\n"), (0, "0\n")):
            clocks.set("worker-1", hours * 3600)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == seen
    assert process.returncode == 0


def test_without_a_compiler_there_are_no_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClockError, match="apt install gcc"):
        Clocks(tmp_path / "clocks")
