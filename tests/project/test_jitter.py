"""The delays of `tests/jitter`: drawn from a seed where they are asked for, and else none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.waiting import PATIENCE

_CALLS = {
    "fsync": "os.fsync(file.fileno())",
    "rename": "os.rename('a', 'a')",
    "replace": "os.replace('a', 'a')",
    "link": "os.link('a', f'link-{n}')",
    "path": "pathlib.Path('a').rename('a')",
    "connect": "socket.create_connection(server.getsockname()).close()",
    "subprocess": "subprocess.run(['true'])",
    "kill": "os.kill(os.getpid(), 0)",
    "killpg": "os.killpg(0, 0)",
    "pidfd": "signal.pidfd_send_signal(own, 0)",
    "fork": "(os.fork() or os._exit(0)) and os.wait()",
}
_PROGRAM = """
import json, os, pathlib, signal, socket, subprocess, sys, time
slept = []
time.sleep = slept.append
server = socket.create_server(("127.0.0.1", 0), backlog=100)
own = os.pidfd_open(os.getpid())
with open("a", "w") as file:
    for n in range(40):
        exec(sys.argv[1])
print(json.dumps(slept))
"""


def delays(
    folder: Path, call: str, seed: str | None, test: str | None = "a.py::test_a (call)", *words: str
) -> list[float]:
    """Return the delays of forty calls, in seconds, which the process only notes."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTEST_CURRENT_TEST": test or ""}
    if test is None:
        del environment["PYTEST_CURRENT_TEST"]
    environment["PYTHONPATH"] = f"{ROOT / 'tests' / 'jitter'}"
    environment.pop("MOTLEY_TEST_JITTER", None)
    if seed is not None:
        environment["MOTLEY_TEST_JITTER"] = seed
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM, call, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", _CALLS.values(), ids=_CALLS)
def test_a_call_is_delayed_now_and_then(tmp_path: Path, call: str) -> None:
    found = delays(tmp_path, call, "1")
    assert 1 <= len(found) <= 30
    assert all(0 <= seconds <= 0.5 for seconds in found)


def test_the_delays_follow_from_the_seed_and_the_test(tmp_path: Path) -> None:
    call = _CALLS["fsync"]
    first = delays(tmp_path / "a", call, "1")
    assert delays(tmp_path / "b", call, "1") == first
    assert delays(tmp_path / "c", call, "2") != first
    assert delays(tmp_path / "d", call, "1", "a.py::test_b (call)") != first
    test = "a.py::test_a (call)"
    role = delays(tmp_path / "e", call, "1", test, "finetune", "--bind", "127.0.0.1:17692")
    assert delays(tmp_path / "f", call, "1", test, "finetune", "--bind", "127.0.0.1:4") == role
    assert delays(tmp_path / "g", call, "1", test, "evaluate", "--bind", "127.0.0.1:4") != role


def test_pytest_itself_is_delayed_only_before_a_signal(tmp_path: Path) -> None:
    assert delays(tmp_path / "a", _CALLS["fsync"], "1", None) == []
    assert 1 <= len(delays(tmp_path / "b", _CALLS["kill"], "1", None)) <= 30


def test_without_a_seed_there_are_none(tmp_path: Path) -> None:
    assert delays(tmp_path, _CALLS["fsync"], None) == []
    assert delays(tmp_path / "empty", _CALLS["fsync"], "") == []
