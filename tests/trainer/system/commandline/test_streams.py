"""Output that a terminal cannot take is escaped, and a full disk is one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE


@pytest.mark.parametrize("program", ["trainer", "launch"])
def test_a_full_disk_is_one_line(program: str) -> None:
    module = {"trainer": "trainer.cli", "launch": "launcher.cli"}[program]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    said = f"{program}: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)


C_LOCALE = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, C_LOCALE])
def test_text_beyond_ascii_is_escaped(locale: dict[str, str]) -> None:
    code = (
        "from trainer.system.commandline.streams import print_any_text; print_any_text();"
        " print('Gr\\u00f6\\u00dfe \\u2013 5')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **locale},
        capture_output=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, rb"Gr\xf6\xdfe \u2013 5" + b"\n"), done.stderr
