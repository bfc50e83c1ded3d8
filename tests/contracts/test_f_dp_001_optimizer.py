"""F-DP-001, the optimizer's part: the same update gives the same bits on every CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("optimizer_trajectory.py")


def run(disabled: list[str]) -> dict:
    environment = dict(os.environ)
    environment.pop("NPY_DISABLE_CPU_FEATURES", None)
    if disabled:
        environment["NPY_DISABLE_CPU_FEATURES"] = " ".join(disabled)
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_f_dp_001_same_bits_with_cpu_features_switched_off():
    full = run([])
    if not full["features"]:
        pytest.skip("this CPU has no features that NumPy dispatches on: nothing to switch off")
    # One at a time from the newest down: each pass is a different kind of CPU.
    for kept in range(len(full["features"])):
        plain = run(full["features"][kept:])
        assert plain["features"] == full["features"][:kept]
        assert plain["weights"] == full["weights"]
        assert plain["state"] == full["state"]


def test_f_dp_001_same_bits_as_when_the_numerics_were_frozen():
    frozen = json.loads(SCRIPT.with_suffix(".json").read_text(encoding="utf-8"))
    result = run([])
    assert result["weights"] == frozen["weights"]
    assert result["state"] == frozen["state"]
