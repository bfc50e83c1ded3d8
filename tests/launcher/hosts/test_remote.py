"""The launcher's end of a pipe: agents that die, fall silent, or are none."""

import json
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from launcher.agent import operations
from launcher.agent.frames import (
    LIMIT,
    FrameError,
    LineSplitter,
    encode_frame,
    error_frame,
    to_error,
)
from launcher.errors import InvalidAnswerError, LauncherError, PreflightError, UnreachableError
from launcher.hosts.local import LocalConnection
from launcher.hosts.remote import RemoteConnection
from launcher.hosts.rpc import AgentLink, NoAgentError
from tests.launcher.agent_pipe import AgentHost, ProcessPipe
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

HELLO = (
    '{"schema": "motley.agent/2", "version": "0", "wheel": null, "python": "/p", "user": "u", '
    '"units": true, "state_folder": "/s", "pid": 1}'
)
Speak = Callable[[str], ProcessPipe]


LISTEN = {"address": "127.0.0.1", "port": 0, "token": "x", "peers": ["other"], "deadline": 60.0}
"""What an agent waits for, as no peer connects."""


@pytest.fixture
def host() -> Iterator[AgentHost]:
    made = AgentHost()
    yield made
    for pipe in made.pipes:
        pipe.process.kill()
    made.end()


@pytest.fixture
def speak() -> Iterator[Speak]:
    """Return a maker of pipes to a program that is not quite an agent."""
    pipes: list[ProcessPipe] = []

    def start(code: str) -> ProcessPipe:
        program = f"HELLO = {HELLO!r}\n{textwrap.dedent(code)}"
        pipes.append(ProcessPipe((sys.executable, "-u", "-c", program)))
        return pipes[-1]

    yield start
    for pipe in pipes:
        pipe.process.kill()
        pipe.end()


def test_an_agent_killed_in_the_middle_of_a_call_is_one_error(host: AgentHost) -> None:
    connection = host.connect()
    caught: list[BaseException] = []

    def read() -> None:
        try:
            connection.call("listen", LISTEN, 60.0)
        except BaseException as error:
            caught.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert connection.exists("/")
    host.pipes[0].process.kill()
    reader.join(20.0)
    (error,) = caught
    assert isinstance(error, UnreachableError)
    assert str(error).startswith("host far: connection lost")
    assert connection.exists("/")  # over a new link
    assert len(host.pipes) == 2


def test_a_lock_whose_link_broke_is_lost_and_said_to_be(host: AgentHost, tmp_path: Path) -> None:
    connection = host.connect()
    path = str(tmp_path / "lock")
    with connection.lock(path, "run"):
        host.pipes[0].process.kill()
        wait_for(lambda: connection.is_spent, "the link to break")
        with LocalConnection().lock(path, "another"):
            pass
        with pytest.raises(UnreachableError, match="the lock held there is lost"):
            connection.exists("/")
    assert not connection.is_spent
    assert connection.exists("/")


def test_a_closed_connection_stays_closed(host: AgentHost) -> None:
    connection = host.connect()
    connection.close()
    connection.close()
    with pytest.raises(UnreachableError, match="host far: the connection was closed"):
        connection.exists("/")
    assert connection.is_spent
    assert host.pipes[0].process.wait(20.0) == 0


def test_a_late_answer_is_told_from_a_host_that_is_gone(host: AgentHost) -> None:
    connection = host.connect()
    link = host.open_link()
    match = r"no answer to `listen` within 0 s; the host itself"
    with pytest.raises(UnreachableError, match=match):
        link.call("listen", LISTEN, 0.1)
    assert link.call("exists", {"path": "/"}, 10.0)
    assert connection.exists("/")


def test_a_host_that_falls_silent_is_given_up(
    host: AgentHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.hosts.rpc.PING", 0.05)
    monkeypatch.setattr("launcher.hosts.rpc.SILENCE", 2.0)
    connection = host.connect()
    host.pipes[0].process.send_signal(signal.SIGSTOP)
    with pytest.raises(UnreachableError, match="host far: no heartbeat for 2 s"):
        connection.exists("/")
    host.pipes[0].process.send_signal(signal.SIGCONT)


def test_an_idle_link_stays_open(host: AgentHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.hosts.rpc.PING", 0.05)
    connection = host.connect()
    link = host.open_link()
    before = link._silence.last
    wait_for(lambda: link._silence.last is not before, "an answer to a ping")
    assert link.broken is None
    assert connection.exists("/")


def test_noise_of_a_login_shell_before_the_hello_is_passed_over(speak: Speak) -> None:
    pipe = speak(
        """
        print("Welcome!"); print('{"a": 1}'); print("motley: units"); print(HELLO)
        import sys; sys.stdin.read()
        """
    )
    link = AgentLink("far", pipe)
    assert list(link.noise) == ["Welcome!", '{"a": 1}', "motley: units"]
    there = RemoteConnection("far", lambda: link)
    there.open_link()
    assert there.units
    assert there.noise == ("Welcome!", '{"a": 1}')


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (
            "import sys; print('hm'); sys.exit('sh: 1: python: not found')",
            "its login shell exited: sh: 1: python: not found",
            ("hm", "sh: 1: python: not found"),
        ),
        (
            "import sys; print('motley: started'); sys.exit('sudo: a password is required')",
            "^host far: its agent exited: sudo: a password is required$",
            ("motley: started", "sudo: a password is required"),
        ),
        ("print('x' * 5_000_000)", "a line of more than", ()),
        ("import time; print('y'); time.sleep(600)", "login shell did not start within 2", ("y",)),
        (
            "import time; print('motley: started'); time.sleep(600)",
            "its agent did not start within 2 s",
            ("motley: started",),
        ),
    ],
)
def test_what_is_no_agent_is_quoted(
    speak: Speak, monkeypatch: pytest.MonkeyPatch, code: str, message: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("launcher.hosts.rpc.HELLO_DEADLINE", 2.0)
    with pytest.raises(NoAgentError, match=message) as caught:
        AgentLink("far", speak(code))
    assert caught.value.details == words
    assert str(caught.value).startswith("host far: ")


def test_an_agent_of_another_version_is_refused_with_what_to_do(speak: Speak) -> None:
    code = "print(HELLO.replace('agent/2', 'agent/9')); import sys; sys.stdin.read()"
    with pytest.raises(PreflightError, match=r"uses protocol motley.agent/9.*launch cluster push"):
        RemoteConnection("far", lambda: AgentLink("far", speak(code))).open_link()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("print('nonsense')", "its agent sent a line that is not JSON"),
        ("print('[]')", "not a JSON object"),
        (f"print('x' * {LIMIT + 1})", f"more than {LIMIT} bytes"),
    ],
)
def test_an_agent_that_goes_mad_breaks_the_link(speak: Speak, answer: str, message: str) -> None:
    code = f"print(HELLO); input(); {answer}; import sys; sys.stdin.read()"
    link = AgentLink("far", speak(code))
    with pytest.raises(UnreachableError, match=message):
        link.call("exists", {"path": "/"}, 20.0)
    with pytest.raises(UnreachableError, match=message):
        link.call("exists", {"path": "/"}, 20.0)


def test_answers_to_nobody_are_dropped(speak: Speak) -> None:
    code = """
    print(HELLO)
    import json
    number = json.loads(input())["id"]
    for other in ({"id": 10**9}, {}, {"id": [number]}, {"id": {}}, {"id": str(number)}):
        print(json.dumps({**other, "result": 1}))
    print(json.dumps({"id": number, "result": "mine"}))
    input()
    """
    assert AgentLink("far", speak(code)).call("x", {}, 20.0) == "mine"


def test_a_request_that_fits_in_no_frame_is_refused_here(host: AgentHost) -> None:
    connection = host.connect()
    with pytest.raises(FrameError, match="the limit is"):
        connection.call("folder", {"path": "x" * LIMIT})
    assert connection.exists("/")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file or directory", "/x"),
        PermissionError(13, "Permission denied", "/x"),
        OSError(28, "No space left on device"),
        PreflightError("busy", ["one", "two"]),
        ValueError("no such question"),
    ],
)
def test_errors_arrive_as_what_they_were(error: Exception) -> None:
    arrived = to_error(error_frame(error), "far")
    assert type(arrived) is type(error)
    if isinstance(error, OSError) and isinstance(arrived, OSError):
        assert (arrived.errno, arrived.filename) == (error.errno, error.filename)
    else:
        assert str(arrived) == f"host far: {error}"
    if isinstance(error, LauncherError) and isinstance(arrived, LauncherError):
        assert arrived.details == error.details


def test_a_defect_over_there_is_said_to_be_one() -> None:
    assert "its agent has a defect: KeyError" in str(to_error(error_frame(KeyError("x")), "far"))
    hostile = {"kind": "SystemExit", "text": "no"}
    assert isinstance(to_error(hostile, "far"), RuntimeError)


def test_lines_are_cut_wherever_the_bytes_are() -> None:
    stream = b"one\n\ntwo" + b"\n" + b"x" * 20 + b"\nlast\n" + b"y" * 30
    expected = [b"one", b"", b"two", None, b"last"]
    for size in (1, 2, 3, 7, len(stream)):
        splitter = LineSplitter(10)
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [line for part in parts for line in splitter.feed(part)] == expected
    with pytest.raises(FrameError):
        encode_frame({"x": "x" * LIMIT})


@pytest.mark.parametrize("value", ["-x", "relative", "", "/a\nb", "/\x1b[2J", 7, None])
@pytest.mark.parametrize("key", ["python", "state_folder"])
def test_a_hello_whose_paths_are_none_is_refused(speak: Speak, key: str, value: object) -> None:
    hello = json.dumps({**json.loads(HELLO), key: value})
    link = AgentLink("far", speak(f"print({hello!r}); import sys; sys.stdin.read()"))
    with pytest.raises(UnreachableError, match=f"its agent sent an invalid reply: hello: {key}: "):
        RemoteConnection("far", lambda: link).open_link()
    assert link.broken


ANSWERS = """
print(HELLO)
import json, sys
for line in sys.stdin:
    number = json.loads(line)["id"]
    print(json.dumps({"id": number, "result": ANSWER}))
"""


@pytest.mark.parametrize("answer", [None, 7, {"a": 1}, [1], [{"pid": []}], "x"])
def test_answers_of_another_kind_are_one_line(speak: Speak, answer: object) -> None:
    pipe = speak(f"ANSWER = {answer!r}\n{ANSWERS}")
    link = AgentLink("far", pipe)
    there = RemoteConnection("far", lambda: link)
    for ask in (partial(there.ask, operations.find_run), there.file_size, there.list_folder):
        if (ask == there.file_size and answer == 7) or (
            ask == there.list_folder and isinstance(answer, list)
        ):
            continue
        with pytest.raises(InvalidAnswerError, match=r"host far: \w+: .*launch cluster push"):
            ask("x")


def test_names_that_are_paths_are_passed_over(speak: Speak) -> None:
    link = AgentLink("far", speak(f"ANSWER = ['a', '../b', '/c', 'd/e']\n{ANSWERS}"))
    assert RemoteConnection("far", lambda: link).list_folder("/") == ["a"]


def test_a_file_without_an_end_does_not_fill_the_memory(
    speak: Speak, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.hosts.remote.MOST_READ", 5 << 20)
    endless = f"import base64\nANSWER = base64.b64encode(bytes(1 << 20)).decode()\n{ANSWERS}"
    link = AgentLink("far", speak(endless))
    there = RemoteConnection("far", lambda: link)
    for limit in (None, 1 << 40):
        with pytest.raises(OSError, match="longer than 5 MiB"):
            there.read("/proc/kcore", 0, limit)
    assert len(there.read("/dev/zero", 0, 100)) == 100


@pytest.mark.parametrize(
    "error",
    [
        {"kind": "OSError", "errno": {"a": 1}, "text": "x"},
        {"kind": "OSError", "errno": "many", "text": "x"},
        {"kind": "OSError", "errno": 2, "text": "x", "path": ["/etc"]},
        {"kind": ["OSError"], "text": "x"},
        {"kind": "PreflightError", "text": "x", "details": "none"},
        {},
    ],
)
def test_an_error_of_another_shape_is_one_line(error: dict[str, object]) -> None:
    found = to_error(error, "far")
    assert isinstance(found, UnreachableError)
    assert str(found) == "host far: invalid error of its agent"
