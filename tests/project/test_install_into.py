"""`make setup SYSTEM=1`: Motley goes into an environment that is there, without a network."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.waiting import PATIENCE
from trainer import __version__


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in ("launcher", "trainer", "scripts"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return an environment that has no packages."""
    venv.create(tmp_path / "environment", with_pip=False)
    return tmp_path / "environment"


def add_packages(environment: Path) -> None:
    """Let an environment have all packages of this one, pip among them."""
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")


@pytest.fixture(autouse=True)
def without_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "MAKEFLAGS"):
        monkeypatch.delenv(name, raising=False)


def setup(checkout: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "setup", "SYSTEM=1", *settings],
        cwd=checkout,
        env={**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:1"},  # nothing answers there
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_motley_is_installed_beside_what_is_there(checkout: Path, environment: Path) -> None:
    add_packages(environment)
    done = setup(checkout, f"PYTHON={environment / 'bin' / 'python'}")
    assert done.returncode == 0, done.stderr
    assert "missing" not in done.stderr
    trainer = environment / "bin" / "trainer"
    said = subprocess.check_output([trainer, "--version"], text=True, cwd=checkout.parent)
    assert said.strip() == __version__
    where = "import trainer; print(trainer.__file__)"
    python = environment / "bin" / "python"
    found = subprocess.check_output([python, "-P", "-c", where], text=True, cwd=checkout.parent)
    assert Path(found.strip()).is_relative_to(checkout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("PYTHON=/no/python",), "setup: no program /no/python; set PYTHON"),
        (("WHEELS=/no/wheels",), "setup: WHEELS=/no/wheels: no such folder"),
        (("WHEELS=.",), "setup: WHEELS=.: holds no wheels"),
    ],
)
def test_what_is_wrong_is_one_line(checkout: Path, settings: tuple[str, ...], message: str) -> None:
    done = setup(checkout, f"PYTHON={sys.executable}", *settings)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith(message)


def test_an_environment_without_pip_is_refused(checkout: Path, environment: Path) -> None:
    done = setup(checkout, f"PYTHON={environment / 'bin' / 'python'}")
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].endswith("has no pip")


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("2.11.0+cu130", "setup: another version than Motley's: torch 2.11.0+cu130 for ==2.13.0"),
        ("2.10.1", "setup: too old: torch 2.10.1 (at least 2.11)"),
    ],
)
def test_missing_packages_are_named_at_once(torch: str, message: str) -> None:
    absent = (
        "import importlib.metadata, runpy, sys\n"
        "installed = importlib.metadata.version\n"
        "def version(name):\n"
        "    if name in ('wgpu', 'blake3'): raise importlib.metadata.PackageNotFoundError(name)\n"
        f"    return {torch!r} if name == 'torch' else installed(name)\n"
        "importlib.metadata.version = version\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    command = [sys.executable, "-c", absent, str(ROOT / "scripts" / "missing_packages.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    other, missing = done.stderr.splitlines()
    assert done.returncode == 1
    assert other.startswith(message)
    assert missing.startswith("setup: missing here: ")
    assert "blake3>=1.0" in missing
    assert "wgpu" in missing


def test_a_slimmed_wheel_has_the_libraries_of_one_cuda_and_a_true_list(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    libraries = [f"bitsandbytes/libbitsandbytes_{x}.so" for x in ("cpu", "cuda121", "cuda130")]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*libraries, "bitsandbytes/__init__.py", "bitsandbytes-1.dist-info/RECORD"):
            archive.writestr(name, name)
    slim = [sys.executable, str(ROOT / "scripts" / "slim_bitsandbytes.py"), str(wheel)]
    refused = subprocess.run([*slim, "999"], capture_output=True, text=True, timeout=PATIENCE)
    assert refused.stderr.endswith("it has cpu, cuda121, cuda130\n")
    subprocess.run([*slim, "130"], check=True, timeout=PATIENCE)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = archive.read("bitsandbytes-1.dist-info/RECORD").decode().splitlines()
    assert libraries[1] not in names
    assert [name for name in libraries if name in names] == [libraries[0], libraries[2]]
    digest = hashlib.sha256(libraries[0].encode()).digest()
    encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert f"{libraries[0]},sha256={encoded},{len(libraries[0])}" in record
    assert len(record) == len(names)


def test_wheels_are_not_collected_without_an_environment(tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_wheels.sh"), str(folder)],
        env={**os.environ, "VENV": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, folder.exists()) == (2, "", False)
    reason = f"gpu_wheels.sh: no {tmp_path}/bin/python; run make setup first, or give VENV\n"
    assert done.stderr == reason
