"""The guard of the root conftest: a session that leaves a child process behind fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
XDIST = ["-p", "xdist", "-n1"]

LEFT = """
import subprocess
KEPT = []

def test_one():
    KEPT.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    KEPT[0].stdin.write(b"line\\n")
    KEPT[0].stdin.flush()
    KEPT[0].stdout.readline()  # it runs: right after Popen its command line may be empty
"""
NOT_WAITED_FOR = """
import os
import subprocess
KEPT = []

def test_one():
    KEPT.append(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, KEPT[0].pid, os.WEXITED | os.WNOWAIT)
"""
WAITED_FOR = """
import subprocess

def test_one():
    subprocess.run(["true"])
"""

THREADS_END = """
import sys
import threading
import pytest
sys.setswitchinterval(1e-5)

def churn():
    while not OVER.is_set():
        thread = threading.Thread(target=OVER.wait, args=[0.0001])
        thread.start()
        thread.join()

OVER = threading.Event()
THREADS = [threading.Thread(target=churn, daemon=True) for _ in range(4)]

@pytest.mark.parametrize("number", range(200))
def test_one(number):
    if number == 0:
        for thread in THREADS:
            thread.start()
    if number == 199:
        OVER.set()
"""


@pytest.mark.parametrize("arguments", [[], XDIST], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("body", "left"),
    [(LEFT, "cat"), (NOT_WAITED_FOR, "ended"), (WAITED_FOR, ""), (THREADS_END, "")],
)
def test_a_left_child_fails_the_session(
    tmp_path: Path, body: str, left: str, arguments: list[str]
) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_sample.py").write_text(body)
    (tmp_path / "test_other.py").write_text("\ndef test_two():\n    pass\n")
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    quiet["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds for each that nothing here needs
    result = subprocess.run(
        [*PYTEST, f"--basetemp={tmp_path}/kept", *arguments, str(tmp_path)],
        cwd=tmp_path,
        env=quiet,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where it warns of what it leaves
        text=True,
        timeout=60,
    )
    assert result.returncode == (1 if left else 0), result.stdout
    assert ("child processes left" in result.stdout) == bool(left)
    assert not left or f"{left} (process " in result.stdout
    assert not left or "first seen after test_sample.py::test_one" in result.stdout
