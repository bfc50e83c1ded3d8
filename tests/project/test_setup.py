"""What `make setup` decides: tested with a stand-in for Python that writes down its pip calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Makes an environment by copying itself, and logs every pip call. $FAIL names what goes wrong.
PYTHON = """#!/bin/sh
case "$*" in
    --version) echo 'Python 3.12.0' ;;
    *sys.version_info\\ \\<*) [ "$FAIL" != old ] ;;
    *'import ensurepip'*) [ "$FAIL" != novenv ] ;;
    *python%d*) echo python3.12-venv ;;
    '-m venv '*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    '-m pip --version') ;;
    *--dry-run*) [ "$FAIL" != noindex ] ;;
    *pip*) echo "$*" >>"$PIP_LOG"; [ "$FAIL" != pip ] ;;
esac
"""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
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
    assert "--constraint .venv/constraints.txt --editable .[dev]" in pip_calls(tmp_path)
    assert (checkout / ".venv" / "constraints.txt").read_text() == "torch==2.13.0\n"

    second = setup(checkout)
    assert (second.returncode, second.stdout + second.stderr) == (0, "")
    assert pip_calls(tmp_path) == ""


def test_a_changed_project_file_updates_in_place(
    checkout: Path, setup: Setup, tmp_path: Path
) -> None:
    setup(checkout)
    pip_calls(tmp_path)
    (checkout / ".venv" / "kept").touch()
    with (checkout / "pyproject.toml").open("a") as file:
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
    calls = pip_calls(tmp_path)
    assert "torch==2.13.0+cpu" in calls
    assert "index-url" not in calls


def test_else_from_the_cpu_index(checkout: Path, setup: Setup, tmp_path: Path) -> None:
    setup(checkout, fail="noindex")
    assert f"--index-url {CPU_INDEX} torch==2.13.0\n" in pip_calls(tmp_path)


def test_an_nvidia_gpu_gets_the_cuda_build(checkout: Path, setup: Setup, tmp_path: Path) -> None:
    setup(checkout, gpu=True)
    calls = pip_calls(tmp_path)
    assert " torch==2.13.0\n" in calls
    assert "+cpu" not in calls
    assert "index-url" not in calls


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
