"""Installations below a folder of the test, from a folder of wheels."""

import json
import os
from pathlib import Path

import pytest

from launcher.installation import install as installation
from tests.launcher.handmade import make_wheel
from tests.launcher.installation.small import Answer, Install, leaf_or_twig


@pytest.fixture
def shelf(tmp_path: Path, uv_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of wheels that is the only index pip and uv know."""
    folder = tmp_path / "shelf"
    for name in ("leaf", "twig"):
        leaf_or_twig(folder, name)
    make_wheel(folder, "unlocked", "1.0", {"unlocked.py": ""})
    os.link(uv_wheel, folder / uv_wheel.name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def install(tmp_path: Path, shelf: Path, capsys: pytest.CaptureFixture[str]) -> Install:
    """Return a caller of the program; `code` is the exit code that is expected."""

    def call(command: str, *arguments: str | Path, code: int = 0) -> Answer:
        words = [command, "--root", str(tmp_path / "root"), *map(str, arguments)]
        assert installation.main(words) == code
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        return json.loads(lines[0])

    return call
