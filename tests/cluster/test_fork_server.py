"""The fork server of the cluster tests: what it says it started is what was asked for."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fork_server import Forked, ForkServer

PATIENCE = 270.0


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def start(server: ForkServer, source: int, output: Path, patience: float = PATIENCE) -> Forked:
    """Start a program that copies JSON from a descriptor to a file once that has ended."""
    with output.open("wb") as written:
        streams = (source, written.fileno(), written.fileno())
        argv = ["-m", "json.tool", "--compact"]
        return server.start(argv, output.parent, os.environ, streams, patience=patience)


def test_a_late_start_is_killed_and_not_taken_for_the_next_one(
    server: ForkServer, tmp_path: Path
) -> None:
    """On a busy host the answer comes after its caller has given up."""
    endless, never_written = os.pipe()
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        start(server, endless, tmp_path / "late", 0.01)
    os.close(endless)  # from here on the late one is its only reader
    os.kill(server.pid, signal.SIGCONT)
    text = tmp_path / "text"
    text.write_text("[1, 2]")
    with text.open("rb") as source:
        process = start(server, source.fileno(), tmp_path / "copy")
    assert process.wait(PATIENCE) == 0, (tmp_path / "copy").read_text()
    assert (tmp_path / "copy").read_text() == "[1,2]\n"
    closed = select.poll()
    closed.register(never_written, 0)
    assert closed.poll(PATIENCE * 1000) == [(never_written, select.POLLERR)]
    os.close(never_written)


SAME_NUMBER = """
import json, socket
here = socket.socket(fileno=0)
for code in (0, -9):
    request = json.loads(here.recv(1 << 20))
    here.send(json.dumps({"number": request["number"], "pid": 4242}).encode())
    if code:
        here.recv(1 << 20)
    here.send(json.dumps({"ended": 4242, "returncode": code}).encode())
here.recv(1 << 20)
"""


def test_a_process_with_the_number_of_an_ended_one_runs(tmp_path: Path) -> None:
    """Numbers come again after some 30,000 processes; what the first one ended with is not news."""
    server = ForkServer(inside=[sys.executable, "-c", SAME_NUMBER])
    with Path(os.devnull).open("rb") as nothing:
        assert start(server, nothing.fileno(), tmp_path / "first").wait(PATIENCE) == 0
        second = start(server, nothing.fileno(), tmp_path / "second")
        assert second.poll() is None
        with pytest.raises(TimeoutError):  # which lets it end
            start(server, nothing.fileno(), tmp_path / "third", 0.01)
        assert second.wait(PATIENCE) == -9
    server.close()


def test_a_server_that_ended_says_so(server: ForkServer, tmp_path: Path) -> None:
    os.kill(server.pid, signal.SIGKILL)
    with Path(os.devnull).open("rb") as nothing, pytest.raises((RuntimeError, OSError)):
        start(server, nothing.fileno(), tmp_path / "never")


def test_processes_of_a_session_share_one_that_ends_with_the_last(tmp_path: Path) -> None:
    meeting = tmp_path / "here" / "json"
    meeting.parent.mkdir()
    first = ForkServer("json", meeting=meeting)
    second = ForkServer("json", meeting=meeting)
    assert first.pid
    assert not second.pid
    text = tmp_path / "text"
    for server, content in ((first, "[1, 2]"), (second, "[3, 4]")):
        text.write_text(content)
        with text.open("rb") as source:
            process = start(server, source.fileno(), tmp_path / "copy")
        assert process.wait(PATIENCE) == 0
        assert (tmp_path / "copy").read_text() == f"{content.replace(' ', '')}\n"
    second.close()
    with Path(os.devnull).open("rb") as nothing:
        assert start(first, nothing.fileno(), tmp_path / "nothing").wait(PATIENCE) == 1
    first.close()
    assert not meeting.parent.exists()
