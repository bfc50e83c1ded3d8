"""The workers that a coordinator starts itself, as real processes."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.waiting import wait_for
from trainer.system.process import local_workers
from trainer.system.process.local_workers import LocalWorkers

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
PROGRAM = "import sys; open(sys.argv[1], 'a').write('x'); sys.exit(int(sys.argv[2]))"


def test_a_code_that_would_only_repeat_itself_ends_a_worker(tmp_path: Path) -> None:
    codes = (3, 0, 4, 5, 130)
    commands = [[sys.executable, "-c", PROGRAM, f"{tmp_path}/{code}", f"{code}"] for code in codes]
    lost = tmp_path / "3"
    with tempfile.TemporaryFile() as run_file:
        workers = LocalWorkers(run_file.fileno(), lambda error: None)
        workers.start(commands)
        deadline = time.monotonic() + 60.0
        while not lost.exists() or len(lost.read_text()) < 3:
            assert time.monotonic() < deadline, "the third start of the worker that lost its link"
            time.sleep(0.05)
        workers.stop()
    starts = {code: len((tmp_path / str(code)).read_text()) for code in codes[1:]}
    assert starts == {0: 1, 4: 1, 5: 1, 130: 1}


def test_none_is_left_of_those_that_do_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "_GRACE", 0.01)
    files = [tmp_path / str(index) for index in range(8)]
    with tempfile.TemporaryFile() as run_file:
        workers = LocalWorkers(run_file.fileno(), lambda error: None)
        workers.start([[sys.executable, "-c", DEAF, str(file)] for file in files])
        wait_for(lambda: all(file.exists() and file.read_text() for file in files), "they are deaf")
        workers.stop()
        assert not [file for file in files if Path("/proc", file.read_text()).exists()]
