"""What `make setup` decides: tested with a stand-in for Python that writes down what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT

CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Makes an environment by copying itself, and logs every call of pip and uv. $FAIL names what goes
# wrong.
PYTHON = """#!/bin/sh
case "$*" in
    --version) echo 'Python 3.12.0' ;;
    *sys.version_info\\ \\<*) [ "$FAIL" != old ] ;;
    *'import ensurepip'*) [ "$FAIL" != novenv ] ;;
    *python%d*) echo python3.12-venv ;;
    '-m venv '*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    '-m pip --version') ;;
    *--dry-run*) [ "$FAIL" != noindex ] ;;
    *pip*) echo "${UV_DEFAULT_INDEX:+index $UV_DEFAULT_INDEX: }$*" >>"$PIP_LOG"
        case "$FAIL $*" in
            pip*) echo 'ERROR: No matching distribution found for uv'; exit 1 ;;
            uv*uv_like*) printf 'error: Request failed\\n  Caused by: dns error\\n'; exit 2 ;;
        esac ;;
esac
"""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "launcher" / "installation").mkdir(parents=True)
    for name in ("scripts/setup.sh", "launcher/installation/uv_like_pip.py"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "launcher" / "locks", folder / "launcher" / "locks")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    passes = folder / "trainer" / "system" / "passes"
    passes.mkdir(parents=True)
    shutil.copy(ROOT / "trainer" / "system" / "passes" / "passes.c", passes)
    return folder


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    """Return a runner of `make setup` in a checkout, with stand-ins first on PATH."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()

    def run(
        checkout: Path, *arguments: str, fail: str = "", gpu: bool = False
    ) -> subprocess.CompletedProcess[str]:
        programs = {
            "python3": PYTHON,
            "nvidia-smi": f"#!/bin/sh\nexit {0 if gpu else 9}\n",
            "id": "#!/bin/sh\necho 1000\n",
            "uname": "#!/bin/sh\necho Linux\n",
        }
        for name, body in programs.items():
            (stubs / name).write_text(body)
            (stubs / name).chmod(0o755)
        return subprocess.run(
            ["make", "--no-print-directory", "setup", *arguments],
            cwd=checkout,
            env={
                "PATH": f"{stubs}{os.pathsep}{os.environ['PATH']}",
                "PIP_LOG": str(tmp_path / "pip.log"),
                "PYTHON": "python3",
                "FAIL": fail,
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def pip_calls(tmp_path: Path) -> str:
    """Return the pip calls since the last look."""
    log = tmp_path / "pip.log"
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return text


def test_says_what_it_installs_then_stays_quiet(
    checkout: Path, setup: Setup, tmp_path: Path
) -> None:
    first = setup(checkout)
    assert first.returncode == 0, first.stderr
    assert "torch 2.13.0 for CPU" in first.stderr
    assert "without root" in first.stderr
    tools, packages, motley = pip_calls(tmp_path).splitlines()
    for call in (tools, packages):
        assert "--require-hashes --no-deps --only-binary :all: -r launcher/locks/" in call
    assert tools.endswith(" -r launcher/locks/uv.txt")
    assert packages.endswith(" -r launcher/locks/dev.txt -r launcher/locks/torch-cpu.txt")
    assert motley.endswith(" --no-deps --no-build-isolation --editable .")
    assert not (checkout / ".venv" / "setup.log").exists()

    second = setup(checkout)
    assert (second.returncode, second.stdout + second.stderr) == (0, "")
    assert pip_calls(tmp_path) == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "launcher/locks/trainer.txt"])
def test_a_changed_project_file_updates_in_place(
    checkout: Path, setup: Setup, tmp_path: Path, name: str
) -> None:
    setup(checkout)
    pip_calls(tmp_path)
    (checkout / ".venv" / "kept").touch()
    with (checkout / name).open("a") as file:
        file.write("\n# changed\n")
    assert "updating" in setup(checkout).stderr
    assert "--editable" in pip_calls(tmp_path)
    assert (checkout / ".venv" / "kept").exists()


def test_an_interrupted_setup_is_removed_and_made_again(checkout: Path, setup: Setup) -> None:
    assert setup(checkout, fail="pip").returncode != 0
    (checkout / ".venv" / "half-made").touch()
    again = setup(checkout)
    assert again.returncode == 0
    assert "interrupted" in again.stderr
    assert not (checkout / ".venv" / "half-made").exists()


def test_a_moved_checkout_gets_a_new_environment(
    checkout: Path, setup: Setup, tmp_path: Path
) -> None:
    setup(checkout)
    moved = checkout.rename(tmp_path / "moved")
    assert "it was made in" in setup(moved).stderr


def test_an_environment_made_by_hand_is_kept(checkout: Path, setup: Setup, tmp_path: Path) -> None:
    setup(checkout)
    (checkout / ".venv" / "motley-setup").unlink()
    (checkout / ".venv" / "kept").touch()
    assert setup(checkout).returncode == 0
    assert (checkout / ".venv" / "kept").exists()


def test_cpu_torch_comes_from_pips_own_configuration_first(
    checkout: Path, setup: Setup, tmp_path: Path
) -> None:
    setup(checkout)
    assert "index" not in pip_calls(tmp_path)


def test_else_from_the_cpu_index(checkout: Path, setup: Setup, tmp_path: Path) -> None:
    setup(checkout, fail="noindex")
    calls = [line for line in pip_calls(tmp_path).splitlines() if line.startswith("index ")]
    (torch,) = calls
    assert torch.startswith(f"index {CPU_INDEX}: ")
    assert torch.endswith(" --only-binary :all: -r launcher/locks/torch-cpu.txt")


def test_an_nvidia_gpu_gets_the_cuda_build(checkout: Path, setup: Setup, tmp_path: Path) -> None:
    setup(checkout, gpu=True)
    calls = pip_calls(tmp_path)
    assert "-r launcher/locks/dev.txt -r launcher/locks/torch-cuda.txt" in calls
    assert "torch-cpu" not in calls


@pytest.mark.parametrize(
    ("fail", "line"),
    [
        ("pip", "uv could not be installed: No matching distribution found for uv"),
        ("uv", "a package could not be installed: dns error"),
    ],
)
def test_without_a_network_the_error_is_one_line(
    checkout: Path, setup: Setup, fail: str, line: str
) -> None:
    result = setup(checkout, fail=fail)
    assert result.returncode != 0
    errors = [said for said in result.stderr.splitlines() if "could not be installed" in said]
    assert errors == [f"setup: {line} (more in .venv/setup.log)"]
    assert "Caused by" not in result.stderr
    assert (checkout / ".venv" / "setup.log").stat().st_size > 0


def test_another_torch_build_makes_a_new_environment(checkout: Path, setup: Setup) -> None:
    setup(checkout)
    assert "not cuda" in setup(checkout, "TORCH=cuda").stderr
    assert setup(checkout).stderr == ""  # auto accepts what was chosen before


@pytest.mark.parametrize(
    ("arguments", "fail", "message"),
    [
        ((), "novenv", "sudo apt-get install python3.12-venv"),
        ((), "old", "Python 3.11 or newer is needed"),
        (("TORCH=rocm",), "", "allowed are auto, cpu and cuda"),
    ],
)
def test_what_is_missing_is_one_line(
    checkout: Path, setup: Setup, arguments: tuple[str, ...], fail: str, message: str
) -> None:
    result = setup(checkout, *arguments, fail=fail)
    assert result.returncode != 0
    assert message in result.stderr.splitlines()[0]
    assert not (checkout / ".venv").exists()


def test_the_checkout_is_installed_as_a_path(tmp_path: Path) -> None:
    """As a hook of the import system, setuptools' default here, a start takes twice as long."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("launcher", "trainer"):
        (tmp_path / package).mkdir()
        shutil.copy(ROOT / package / "__init__.py", tmp_path / package)
    build = "from setuptools import build_meta; build_meta.build_editable('out')"
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-P", "-c", build]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth")
        assert archive.read(path).decode().strip() == str(tmp_path)
