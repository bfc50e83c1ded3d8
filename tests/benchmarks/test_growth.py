"""The benchmark of growth measures all commands of each part, also at tiny sizes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rig.network import missing
from tests import ROOT

COMMANDS = [
    *("a start", "a step", "status", "the list of runs", "the dashboard", "a report"),
    "a resumption",
]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("part", "sizes", "more"),
    [
        ("rows", (90,), ["a start again"]),
        ("steps", (20, 40), []),
        ("runs", (3,), ["a start again"]),
        ("workers", (1,), []),
        ("hosts", (2,), []),
        ("adapters", (5,), []),
    ],
)
def test_each_command_is_measured(
    tmp_path: Path, part: str, sizes: tuple[int, ...], more: list[str]
) -> None:
    if part == "hosts" and (reason := missing()):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "benchmarks/growth.py", part, "--sizes", *map(str, reversed(sizes))],
        cwd=ROOT,
        env={**os.environ, "BENCHMARK_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    figures = json.loads((tmp_path / f"growth-{part}.json").read_text())["figures"]
    names = [f"{part}, {command}: slope of the processor time" for command in COMMANDS + more]
    assert [each["ratio"] for each in figures] == names
    for each in figures:
        assert each["sizes"] == [*sizes]
        for name in ("seconds", "cpu", "mebibytes"):
            assert len(each[name]) == len(sizes)
            assert all(value > 0 for value in each[name])


def test_the_slope_is_the_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    growth = importlib.import_module("growth")
    cubic = {size: growth.Spent(1.0, 5.0 * size**3, 1.0) for size in (10, 30, 100)}
    assert growth.slope(cubic) == pytest.approx(3)
    assert growth.slope({10: cubic[10]}) == 0
