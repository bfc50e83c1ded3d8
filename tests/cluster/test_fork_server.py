"""The fork server of the cluster tests: what it says it started is what was asked for."""

from __future__ import annotations

import os
import select
import signal
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
