"""uv looks for packages where pip is told to look."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SECRET = "https://me:secret@mirror.example/simple"


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Return an environment whose uv writes down its arguments and its variables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # No link: through one Python does not find its environment, and the system's has no pip.
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    (folder / "uv").write_text(f'#!/bin/sh\necho "$*" >{tmp_path}/argv\nenv >{tmp_path}/env\n')
    (folder / "uv").chmod(0o755)
    return folder


def call(told: Path, configuration: str, **variables: str) -> tuple[str, dict[str, str]]:
    """Return the arguments and variables that uv gets."""
    file = told.parent / "pip.conf"
    file.write_text(configuration)
    environment = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": str(file), "HOME": str(told)}
    environment["PYTHONPATH"] = str(ROOT)
    # As if it had been called by the name that lies beside uv.
    program = f"import sys; sys.executable = {str(told / 'python')!r}; "
    program += "from launcher.installation import uv_like_pip; uv_like_pip.main()"
    command = [sys.executable, "-c", program, "pip", "install", "numpy"]
    subprocess.run(command, env={**environment, **variables}, check=True, timeout=60)
    lines = (told.parent / "env").read_text().splitlines()
    return (told.parent / "argv").read_text(), dict(line.split("=", 1) for line in lines)


def test_the_settings_of_pip_reach_uv(told: Path, tmp_path: Path) -> None:
    configuration = f"""[global]
index-url = {SECRET}
find-links =
    {tmp_path}/wheels
    {tmp_path}/more
[install]
trusted-host = mirror.example
"""
    variables = {"PIP_EXTRA_INDEX_URL": "file:///a/simple file:///b/simple", "PIP_CERT": "/ca.pem"}
    argv, found = call(told, configuration, **variables)
    assert argv == "pip install numpy\n"
    assert found["UV_DEFAULT_INDEX"] == SECRET
    assert found["UV_INDEX"] == "file:///a/simple file:///b/simple"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert found["UV_FIND_LINKS"] == f"{tmp_path}/wheels,{tmp_path}/more"
    assert found["UV_INSECURE_HOST"] == "mirror.example"
    assert found["SSL_CERT_FILE"] == "/ca.pem"


def test_what_is_told_to_uv_itself_wins(told: Path) -> None:
    configuration = f"[global]\nindex-url = {SECRET}\n"
    _, found = call(told, configuration, UV_DEFAULT_INDEX="https://other.example/simple")
    assert found["UV_DEFAULT_INDEX"] == "https://other.example/simple"


def test_no_index(told: Path) -> None:
    argv, found = call(told, "[global]\nno-index = true\n")
    assert argv == "pip install numpy --no-index\n"
    assert "UV_DEFAULT_INDEX" not in found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_home_that_cannot_be_written_costs_the_cache_only(told: Path) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    program = "from launcher.installation.uv_like_pip import cache_fails; print(cache_fails())"
    python = os.path.realpath("/usr/bin/python3")
    command = ["setpriv", "--reuid", "65534", "--clear-groups", python, "-c", program]
    environment = {"HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
