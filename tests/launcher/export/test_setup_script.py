"""An exported `setup.sh` as it runs on a node: real environments, small wheels by their hashes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher.cli import run
from tests.launcher.handmade import lock_of, make_wheel
from tests.trainer.small_model import write_data, write_model

FOLDER = 'away "it\'s" $HOME'

pytestmark = pytest.mark.cluster  # each environment takes seconds


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of wheels that is the only index pip knows."""
    folder = tmp_path / "shelf"
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a checkout would be before what is installed
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    make_wheel(folder, "torch", "2.0", {"torch.py": "name = 'torch'"})
    # It needs what no lock names: nothing but the locks may decide what is installed.
    make_wheel(folder, "leaf", "1.0", {"leaf.py": "name = 'leaf'"}, "Requires-Dist: unlocked")
    return folder


@pytest.fixture
def folder(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """Return the folder of a run that was exported with a small Motley."""
    monkeypatch.setenv("MOTLEY_STATE_DIR", str(tmp_path / "state"))
    torch, leaf = (shelf / f"{name}-py3-none-any.whl" for name in ("torch-2.0", "leaf-1.0"))
    files = {
        "trainer/__init__.py": "",
        "trainer/system/passes/__main__.py": "",
        "trainer/__main__.py": "from trainer.cli import main\nmain()\n",
        "trainer/cli.py": "import leaf, torch\ndef main(): print('with', leaf.name, torch.name)\n",
        "motley-9.9.dist-info/entry_points.txt": "[console_scripts]\ntrainer = trainer.cli:main\n",
        "launcher/locks/trainer.txt": lock_of(leaf),
        **{f"launcher/locks/torch-{build}.txt": lock_of(torch) for build in ("cpu", "cuda")},
    }
    wheel = make_wheel(tmp_path, "motley", "9.9", files)
    data = write_data(tmp_path / "data.jsonl")
    described = ("--model", str(write_model(tmp_path / "model", data)), "--data", str(data))
    into = ("--wheel", str(wheel), "--into", str(tmp_path / FOLDER))
    command = ["export", "--to", "slurm", "--target", "1 node x 2 CPU", *described, *into]
    assert run(command) == 0, capsys.readouterr().err
    return tmp_path / FOLDER


def test_a_python_that_is_too_old_is_one_line(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["sh", "setup.sh"],
        cwd=folder,
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"{old} is no Python 3.11 or later; give one: PYTHON=python3.12 sh setup.sh\n"
    )
    assert not (folder / ".venv").exists()


def set_up(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as the printed steps do, from another folder."""
    return subprocess.run(
        ["sh", str(folder / "setup.sh")],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.long
def test_it_installs_what_is_locked_and_motley_and_a_second_call_nothing(folder: Path) -> None:
    first = set_up(folder)
    assert first.returncode == 0, first.stdout + first.stderr
    # Slurm's part of it: srun starts what the script names, in the folder.
    srun = folder.parent / "srun"
    srun.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    srun.chmod(0o755)
    here = {**os.environ, "PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    said = subprocess.run(
        ["bash", "job.sbatch"], cwd=folder, env=here, capture_output=True, text=True, timeout=60
    )
    assert (said.stdout, said.stderr) == ("with leaf torch\n", "")
    again = set_up(folder)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")


def test_another_package_than_the_locked_one_is_refused_and_the_next_call_goes_on(
    folder: Path, shelf: Path, bare_venv: Path
) -> None:
    shutil.copytree(bare_venv, folder / ".venv", symlinks=True)  # as an earlier call has left it
    (folder / ".venv/bin/pip").touch(0o755)
    leaf = shelf / "leaf-1.0-py3-none-any.whl"
    good = leaf.read_bytes()
    make_wheel(shelf, "leaf", "1.0", {"leaf.py": "name = 'stolen'"})
    refused = set_up(folder)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr
    assert not (folder / ".venv/bin/trainer").exists()
    leaf.write_bytes(good)
    after = set_up(folder)
    assert after.returncode == 0, after.stdout + after.stderr
    assert (folder / ".venv/bin/trainer").exists()
