"""A run that goes to a Slurm of this machine and comes back; two booted hosts: `tests/testbed`."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import ROOT
from tests.cluster.going_out import check_one_loss_curve

pytestmark = pytest.mark.cluster

SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "ip")
NAMESPACES = ("--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")


def in_slurm(state: Path, folder: Path) -> None:
    """Submit the job of an exported folder to a Slurm of its own, and wait for its end."""
    state.mkdir()
    command = ["unshare", *NAMESPACES, "sh", str(ROOT / "tests/cluster/slurm.sh")]
    path = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
    done = subprocess.run(
        [*command, str(state), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PATH": path},
    )
    said = "".join(log.read_text() for log in [*folder.glob("slurm-*.log"), *state.glob("*.log")])
    assert done.returncode == 0, done.stdout + done.stderr + said


@pytest.mark.long
@pytest.mark.needs(*SLURM)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_run_goes_to_slurm_and_comes_back_with_one_loss_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = partial(in_slurm, tmp_path / "slurm")
    check_one_loss_curve(tmp_path, "2 nodes x 2 CPU", submit, monkeypatch, capsys)
