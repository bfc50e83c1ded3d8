"""Every mistake of a newcomer is answered in a line that says what is wrong and what to do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.newcomer.mistakes import MISTAKES, Mistake, answered, complaints, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newcomer")
    prepare(folder)
    return folder


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_it_is_answered(folder: Path, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "MOTLEY_STATE_DIR": str(folder / "state"), "NO_COLOR": "1"}
    monkeypatch.chdir(folder)
    program, *words = mistake.command.split()
    module = {"trainer": "trainer.cli", "launch": "launcher.cli"}[program]
    command = [sys.executable, "-m", module, *words]
    done = forked.run(command, environment | mistake.environment)
    answer = answered(mistake, done)
    assert list(complaints(mistake, answer)) == [], answer
    assert not (folder / "out").exists(), "nothing is begun"
