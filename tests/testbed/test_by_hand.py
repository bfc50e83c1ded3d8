"""The test bed by hand, as README.md shows it: from `up` by way of the recipe to `down`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.command_blocks import ROOT, command_block
from tests.testbed.lab import Lab

pytestmark = [pytest.mark.testbed, pytest.mark.timeout(1200)]

RECIPE = "recipes/gpu-training.yml"


@pytest.mark.usefixtures("machine")
def test_the_documented_sequence(lab_folder: Path, tmp_path: Path) -> None:
    block = command_block("tests/testbed/README.md", "The test bed")
    # torch is left out: test_training.py installs it, and takes minutes for it.
    script = block.text.replace(RECIPE, f"{RECIPE} -e trainer_extras=coordinator")
    script = script.replace("/tmp/hosts.yml", str(tmp_path / "hosts.yml"))
    assert script.count(str(tmp_path)) == 2
    environment = {
        **os.environ,
        "MOTLEY_TESTBED": str(lab_folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    try:
        done = subprocess.run(
            ["bash", "-euxc", f"sudo() {{ :; }}\n{script}"],  # root it is already
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=1000,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert not Lab(lab_folder).is_up
    finally:
        Lab(lab_folder).down()
    recap = [line for line in done.stdout.splitlines() if "unreachable=0    failed=0" in line]
    assert [line.split()[0] for line in recap] == ["extra", "intel", "lambda"]
