"""The root conftest: what fails a session, and what a session leaves out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import ROOT, passed_elsewhere

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
HOLDS_OUR_OUTPUT = """
import os
import signal

def test_one():
    if os.fork() == 0:
        while True:
            signal.pause()
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
UNEXPECTED = "import pytest\n\ndef test_one():\n    pytest.skip('not today')\n"
EXPECTED = "import pytest\n\ndef test_one():\n    pytest.skip('needs root: mounts a tmpfs')\n"
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_module')\n\ndef test_one():\n    pass\n"
MIXED = """
import os
import pytest

@pytest.mark.parametrize("word", ["a b", "c"])
def test_passes(word):
    pass

def test_skipped_there():
    if "THERE" in os.environ:
        pytest.skip("needs root")

def test_fails():
    assert False
"""


def session(
    folder: Path, body: str, arguments: list[str], environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a file of tests, and another that passes; return the exit code and what is printed."""
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    (folder / "test_sample.py").write_text(body)
    (folder / "test_other.py").write_text("\ndef test_two():\n    pass\n")
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    quiet = {k: v for k, v in quiet.items() if k not in ("CI", "MOTLEY_STRICT_SKIPS")}
    quiet["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds for each that nothing here needs
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", *arguments]
    done = subprocess.run(
        [*command, f"--basetemp={folder}/kept", str(folder)],
        cwd=folder,
        env={**quiet, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # where it warns of what it leaves
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("arguments", [[], XDIST], ids=["alone", "xdist"])
@pytest.mark.parametrize(
    ("body", "left"),
    [
        (LEFT, "cat"),
        (HOLDS_OUR_OUTPUT, ""),
        (NOT_WAITED_FOR, "ended"),
        (WAITED_FOR, None),
        (THREADS_END, None),
    ],
)
def test_a_left_child_fails_the_session(
    tmp_path: Path, body: str, left: str | None, arguments: list[str]
) -> None:
    code, printed = session(tmp_path, body, arguments, {})
    assert code == (0 if left is None else 1), printed
    assert ("child processes left" in printed) == (left is not None)
    assert left is None or f"{left} (process " in printed
    assert left is None or "first seen after test_sample.py::test_one" in printed


@pytest.mark.parametrize(
    ("body", "strict", "arguments", "failed"),
    [
        (UNEXPECTED, {"CI": "true"}, [], True),
        (UNEXPECTED, {"MOTLEY_STRICT_SKIPS": "1"}, [], True),
        (UNEXPECTED, {"CI": "true"}, XDIST, True),
        (UNEXPECTED, {}, [], False),
        (WHOLE_FILE, {"CI": "true"}, [], True),
        (EXPECTED, {"CI": "true"}, [], False),
    ],
)
def test_only_expected_reasons_pass_in_ci(
    tmp_path: Path, body: str, strict: dict[str, str], arguments: list[str], failed: bool
) -> None:
    code, printed = session(tmp_path, body, arguments, strict)
    assert code == (1 if failed else 0), printed
    assert ("does not expect" in printed) == failed


def test_only_what_passed_elsewhere_is_left_out(tmp_path: Path) -> None:
    passed = tmp_path / "passed"
    session(tmp_path, MIXED, XDIST, {passed_elsewhere.NOTE: str(passed), "THERE": "1"})
    named = [name.partition("::")[2] for name in passed.read_text().splitlines()]
    assert sorted(named) == ["test_passes[a b]", "test_passes[c]", "test_two"]
    _, printed = session(tmp_path, MIXED, XDIST, {passed_elsewhere.LEAVE_OUT: str(passed)})
    assert "test_passes" not in printed
    assert "1 failed, 1 passed" in printed
