"""An agent in a process of its own, and what it makes of input that no launcher sends."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import frames
from launcher.agent.frames import LIMIT, LineSplitter
from launcher.agent.operation import OPERATIONS
from launcher.agent.server import MOST_REQUESTS, Agent
from launcher.errors import PreflightError
from launcher.hosts.local import LocalConnection
from tests import ROOT
from tests.launcher.agent_pipe import AGENT


class Talk:
    """Raw lines to an agent and its answers."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.input, self.output = process.stdin, process.stdout
        self.hello = self.answer()

    def say(self, line: bytes) -> None:
        self.input.write(line)
        self.input.flush()

    def ask(self, **request: Any) -> dict[str, Any]:
        self.say(json.dumps(request).encode() + b"\n")
        return self.answer()

    def answer(self) -> dict[str, Any]:
        return json.loads(self.output.readline())


@pytest.fixture
def talk() -> Iterator[Talk]:
    pipe = subprocess.PIPE
    with subprocess.Popen(AGENT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        made = Talk(process)
        yield made
        made.input.close()
        rest = made.output.read()
        assert process.wait(20.0) == 0
        assert not rest


def test_it_greets_first_and_says_what_it_is(talk: Talk) -> None:
    assert talk.hello["schema"] == "motley.agent/2"
    assert talk.hello["user"] == LocalConnection().user
    assert talk.hello["pid"] == talk.process.pid
    assert talk.hello["wheel"] is None
    assert talk.hello["units"] is False


@pytest.mark.parametrize(
    "line",
    [
        b"hello\n",
        b"\n",
        b"[1, 2]\n",
        b"\xff\xfe\0\n",
        b'{"id": 1}\n',
        b'{"id": 1, "op": "no such"}\n',
        b'{"id": 1, "op": ["read"]}\n',
        b'{"id": 1, "op": "__init__", "args": {}}\n',
        b'{"id": 1, "op": "read"}\n',
        b'{"id": 1, "op": "read", "args": "/etc/passwd"}\n',
        b'{"id": 1, "op": "read", "args": {"path": 7, "offset": "x", "limit": null}}\n',
        b'{"id": 1, "op": "is_alive", "args": {"process": {"pid": 1}}}\n',
        b'{"id": 1, "op": "write", "args": {"path": "/x", "data": "%%%", "token": null}}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_nonsense_is_answered_and_the_next_request_too(talk: Talk, line: bytes) -> None:
    talk.say(line)
    assert "error" in talk.answer()
    assert talk.ask(id=2, op="exists", args={"path": "/"}) == {"id": 2, "result": True}


def test_a_line_that_is_too_long_is_dropped_whole(talk: Talk) -> None:
    talk.say(b'{"id": 1, "op": "ping", "x": "' + b"x" * LIMIT)
    talk.say(b'"}\n')
    assert "longer than the limit of a frame" in talk.answer()["error"]["text"]
    assert talk.ask(id=2, op="ping") == {"id": 2, "result": None}


def test_several_requests_in_one_piece_and_one_in_several(talk: Talk) -> None:
    talk.say(b'{"id": 1, "op": "ping"}\n{"id": 2, "op": "ping"}\n{"id": 3,')
    assert [talk.answer()["id"], talk.answer()["id"]] == [1, 2]
    talk.say(b' "op": "ping"}\n')
    assert talk.answer()["id"] == 3


def test_an_answer_that_fits_in_no_frame_is_an_error(talk: Talk, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 3 * frames.PIECE)
    args = {"path": str(tmp_path / "big"), "offset": 0, "limit": 10**9}
    assert len(frames.unpack_bytes(talk.ask(id=1, op="read", args=args)["result"])) == frames.PIECE
    code = "print('noise'); import sys; print('x', file=sys.__stdout__)"
    args = {"argv": [sys.executable, "-c", code], "env": {}, "log": str(tmp_path / "log")}
    assert talk.ask(id=2, op="spawn", args=args) == {"id": 2, "result": None}


def test_its_end_frees_its_locks(tmp_path: Path, talk: Talk) -> None:
    path = str(tmp_path / "lock")
    args = {"path": path, "purpose": "up", "token": "t"}
    assert talk.ask(id=1, op="lock", args=args)["result"] is None
    assert talk.ask(id=2, op="lock", args={**args, "token": "u"})["error"]["kind"] == (
        "PreflightError"
    )
    with pytest.raises(PreflightError), LocalConnection().lock(path, "mine"):
        pass
    talk.process.kill()
    talk.process.wait(20.0)
    with LocalConnection().lock(path, "mine"):
        pass
    talk.process.returncode = 0  # for the fixture: this one was meant to die


Serve = Callable[[], "tuple[int, Iterator[dict[str, Any]], threading.Thread]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what runs an agent in a thread: where to write requests, its answers, the thread."""
    opened: list[int] = []

    def start() -> tuple[int, Iterator[dict[str, Any]], threading.Thread]:
        requests, write = os.pipe()
        read, answers = os.pipe()
        opened.extend((requests, read, answers))
        thread = threading.Thread(target=Agent(requests, answers).serve)
        thread.start()

        def lines() -> Iterator[dict[str, Any]]:
            splitter = LineSplitter()
            while data := os.read(read, 1 << 16):
                for line in splitter.feed(data):
                    yield json.loads(line or b"{}")

        found = lines()
        next(found)
        return write, found, thread

    yield start
    for descriptor in opened:
        os.close(descriptor)


def test_a_request_that_hangs_holds_up_no_other_and_they_are_bounded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def names(folder: str) -> list[str]:  # as in a dead mount
        assert folder == "/slow"
        assert go_on.wait(60.0)
        return ["here"]

    monkeypatch.setitem(OPERATIONS, "names", replace(OPERATIONS["names"], function=names))
    write, answers, thread = serve()
    slow = b'{"id": 7, "op": "names", "args": {"folder": "/slow"}}\n'
    os.write(write, slow * MOST_REQUESTS + b'{"id": 8, "op": "ping"}\n')
    assert next(answers) == {"id": 8, "result": None}
    os.write(write, slow)
    assert "already in progress" in next(answers)["error"]["text"]
    go_on.set()
    for _ in range(MOST_REQUESTS):
        assert next(answers) == {"id": 7, "result": ["here"]}
    os.close(write)
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_launcher_that_fell_silent_loses_its_locks(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.agent.server.SILENCE", 0.2)
    write, answers, thread = serve()
    args = {"path": str(tmp_path / "lock"), "purpose": "up", "token": "t"}
    os.write(write, json.dumps({"id": 1, "op": "lock", "args": args}).encode() + b"\n")
    assert next(answers)["result"] is None
    thread.join(20.0)
    assert not thread.is_alive()
    with LocalConnection().lock(str(tmp_path / "lock"), "mine"):
        pass
    os.close(write)


def test_a_lock_nobody_waits_for_any_more_is_not_taken(serve: Serve, tmp_path: Path) -> None:
    write, answers, thread = serve()
    os.write(write, b'{"id": 1, "op": "unlock", "args": {"token": "t"}}\n')
    assert next(answers)["id"] == 1
    args = {"path": str(tmp_path / "lock"), "purpose": "up", "token": "t"}
    os.write(write, json.dumps({"id": 2, "op": "lock", "args": args}).encode() + b"\n")
    assert next(answers)["id"] == 2
    with LocalConnection().lock(str(tmp_path / "lock"), "mine"):
        pass
    os.close(write)
    thread.join(20.0)


def test_uploads_under_way_are_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.agent.server.MOST_UPLOAD", 100)
    write, answers, thread = serve()
    args = {"token": "t", "data": frames.pack_bytes(b"x" * 80)}
    for expected in (None, "more than 0 MiB of uploads"):
        os.write(write, json.dumps({"id": 1, "op": "append", "args": args}).encode() + b"\n")
        answer = next(answers)
        assert expected is None or expected in answer["error"]["text"]
    os.close(write)
    thread.join(20.0)


@pytest.mark.parametrize("program", ["launcher.agent", "launcher.session"])
def test_what_runs_on_hosts_loads_nothing_but_the_standard_library(program: str) -> None:
    code = (
        f"import sys, {program}.__main__\n"
        "roots = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(roots - set(sys.stdlib_module_names) - {'__main__', '__mp_main__'}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == ["launcher", "trainer"], done.stderr
