"""The benchmark of growth measures each size, also tiny ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.long
def test_each_size_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/growth.py", "--steps", "40", "20"],
        cwd=ROOT,
        env={**os.environ, "BENCHMARK_RESULTS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr, done.stderr
    figures = json.loads((tmp_path / "growth.json").read_text())["figures"][0]
    assert figures["sizes"] == [20, 40]
    for name in ("seconds", "cpu", "mebibytes"):
        assert all(value > 0 for value in figures[name])
