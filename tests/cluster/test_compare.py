"""`benchmarks/compare.py` with real processes: the same training, summed in different ways."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.rig.network import missing
from tests import ROOT

pytestmark = pytest.mark.cluster


def compared(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "benchmarks/compare.py"), "--json", *words]
    small = ("--workers", "2", "--steps", "2", "--megabytes", "0.2")
    run = subprocess.run([*command, *small], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)["rows"]


@pytest.mark.long
def test_every_backend_trains_the_same_steps() -> None:
    names = ("ours", "gloo", "mpi")
    flags = [word for name in names for word in ("--backend", name)]
    rows = compared(*flags)
    assert [row["backend"] for row in rows] == list(names)
    measured = [row for row in rows if row["absent"] is None]
    assert len(measured) >= 2
    for row in measured:
        assert row["loss"] == pytest.approx(measured[0]["loss"], rel=1e-5)
        assert row["sum_milliseconds"] > 0
        assert row["step_milliseconds"] > 0
        assert row["sum_bytes"] is row["limit_milliseconds"] is None  # over the loopback


@pytest.mark.long
def test_a_shaped_network_counts_bytes() -> None:
    if reason := missing():
        pytest.skip(reason)
    (row,) = compared("--backend", "gloo", "--rate", "500")
    size = 1e6 * row["megabytes"]
    assert row["limit_milliseconds"] == pytest.approx(8e3 * size / 500e6)
    assert size <= row["sum_bytes"] <= 1.5 * size
    assert 1e6 * row["step_megabytes"] <= row["step_bytes"] <= 2e6 * row["step_megabytes"]
