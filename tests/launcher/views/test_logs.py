"""Reading and following logs, over an agent that dies in the middle of it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import ConfigError, UnreachableError
from launcher.hosts import ssh
from launcher.hosts.base import Connection
from launcher.hosts.local import LocalConnection
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan, ProcessPlan
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.records.run import Run
from launcher.runs.status import RunMonitor
from launcher.session.spec import RestartPolicy
from launcher.views import logs
from launcher.views.log_printer import LinePrinter
from launcher.views.logs import LogReader, Selection, choose_processes
from tests.launcher.agent_pipe import AgentHost, state_in
from tests.launcher.keeping import python_process
from tests.waiting import PATIENCE, wait_for


class Collector(LinePrinter):
    """Keeps what would be printed; `hook` hears of every line."""

    def __init__(self) -> None:
        super().__init__(False, [])
        self.lines: list[tuple[str, int, str]] = []
        self.hook: Callable[[str], None] = lambda _: None

    def print_lines(self, process: ProcessPlan, attempt: int, lines: Sequence[bytes]) -> None:
        for line in lines:
            self.lines.append((process.name, attempt, line.decode()))
            self.hook(line.decode())

    @property
    def texts(self) -> list[str]:
        return [text for _, _, text in self.lines]


def run_of(*processes: ProcessPlan) -> Run:
    hosts = tuple(Host(name=name) for name in dict.fromkeys(p.host for p in processes))
    plan = LaunchPlan(
        run_id="r", output="/", bind_address="", port=1, hosts=hosts, processes=processes
    )
    return Run(plan, 0.0, hosts)


def write(process: ProcessPlan, attempt: int, data: bytes, marks: bytes = b"") -> None:
    folder = Path(process.folder)
    folder.mkdir(exist_ok=True)
    (folder / f"attempt-{attempt}.log").write_bytes(data)
    if marks:
        (folder / f"attempt-{attempt}.times").write_bytes(marks)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Make every host this machine; the names in the set are away."""
    away: set[str] = set()

    def connect(host: Host) -> Connection:
        if host.name in away:
            raise UnreachableError(f"host {host.name}: no route")
        return LocalConnection()

    monkeypatch.setattr(ssh, "connect_host", connect)
    return away


def existing(selection: Selection, *processes: ProcessPlan) -> list[str]:
    printer = Collector()
    reader = LogReader(RunMonitor(run_of(*processes)), processes, printer, selection)
    reader.print_existing(lambda _: None)
    return printer.texts


@pytest.fixture
def process(tmp_path: Path, here: set[str]) -> ProcessPlan:
    made = python_process(tmp_path, "")
    write(made, 1, b"one\n", b"100 0\n150 4\n")
    write(made, 2, b"two\nthree\nfour\nfi", b"200 0\n210 4\n220 10\n")
    return made


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), ["two", "three", "four", "fi"]),
        (Selection(attempt=1), ["one"]),
        (Selection(tail=2), ["four", "fi"]),
        (Selection(since=lambda _: 1.0), ["one", "two", "three", "four", "fi"]),
        (Selection(since=lambda _: 150.0), ["two", "three", "four", "fi"]),
        (Selection(since=lambda _: 215.0), ["three", "four", "fi"]),
        (Selection(since=lambda _: 230.0, tail=9), ["four", "fi"]),
        (Selection(since=lambda clock: clock - 1e10), ["one", "two", "three", "four", "fi"]),
    ],
)
def test_which_lines(process: ProcessPlan, selection: Selection, expected: list[str]) -> None:
    assert existing(selection, process) == expected


def test_a_log_without_times_is_shown_and_said(process: ProcessPlan) -> None:
    (Path(process.folder) / "attempt-2.times").unlink()
    said: list[str] = []
    printer = Collector()
    selection = Selection(since=lambda _: 230.0)
    reader = LogReader(RunMonitor(run_of(process)), [process], printer, selection)
    reader.print_existing(said.append)
    assert printer.texts == ["two", "three", "four", "fi"]
    assert said == ["--- worker-0: attempt 2 has no timestamps; all of it ---"]


def test_no_such_attempt(process: ProcessPlan) -> None:
    with pytest.raises(ConfigError, match=r"worker-0 has no attempt 9 \(there are: 1, 2\)"):
        existing(Selection(attempt=9), process)


def test_one_host_that_is_away(tmp_path: Path, process: ProcessPlan, here: set[str]) -> None:
    here.add("away")
    gone = replace(python_process(tmp_path, "", "worker-1"), host="away")
    printer = Collector()
    reader = LogReader(RunMonitor(run_of(gone, process)), [gone, process], printer, Selection())
    with pytest.raises(UnreachableError, match="host away: no route"):
        reader.print_existing(lambda _: None)
    assert printer.texts == ["two", "three", "four", "fi"]


def test_choosing(tmp_path: Path) -> None:
    one, two = (python_process(tmp_path, "", name) for name in ("worker-0", "worker-1"))
    run = run_of(one, two)
    assert choose_processes(run, []) == [one, two]
    assert choose_processes(run, ["worker-1", "worker-1"]) == [two]
    with pytest.raises(ConfigError, match=r"no process worker-7 \(there are: worker-0, worker-1\)"):
        choose_processes(run, ["worker-7"])


# Each hundredth line waits until the reader has seen it, and has lost its agent.
WRITER = """
import pathlib, sys, time
gates = pathlib.Path(sys.argv[1])
first = not (gates / 'second').exists()
for number in range(0, 500) if first else range(500, 1000):
    print(f'line {number} ' + 'x' * (number % 97))
    if number % 100 == 99:
        while not (gates / str(number)).exists():
            time.sleep(0.005)
print('half a line', end='' if not first else '\\n')
(gates / 'second').touch()
sys.exit(1 if first else 0)
"""


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentHost]:
    """Return a host behind an agent, to which the launcher is connected.

    Before anything may ask for the connection: a thread of an earlier test that has not ended yet
    would open a second one.
    """
    host = AgentHost("far", state_in(tmp_path / "state"))
    opened = host.connect()
    monkeypatch.setattr(ssh, "connect_host", lambda _host: opened)
    monkeypatch.setattr(logs, "_FIRST_RETRY", 0.01)
    yield host
    opened.close()
    host.end()


@pytest.mark.cluster
def test_no_line_is_lost_or_doubled_when_agents_die(tmp_path: Path, far: AgentHost) -> None:
    process = replace(python_process(tmp_path, WRITER), host="far")
    process = replace(process, argv=(*process.argv, str(tmp_path)))
    run = run_of(process)
    connected = ssh.connect_host(run.hosts[0])
    quick = RestartPolicy(first_delay=0.05)
    SessionSupervisor(connected, "r", restart=quick, grace=1.0).start_process(process)
    printer, said = Collector(), list[str]()

    def lose_the_agent(line: str) -> None:
        number = int(line.split()[1]) if line.startswith("line ") else 0
        if number % 100 == 99:
            agent = far.pipes[-1].process
            agent.kill()
            agent.wait(PATIENCE)
            (tmp_path / str(number)).touch()

    printer.hook = lose_the_agent
    LogReader(RunMonitor(run), [process], printer, Selection()).follow(said.append)
    numbered = [text for text in printer.texts if text.startswith("line ")]
    assert numbered == [f"line {number} " + "x" * (number % 97) for number in range(1000)]
    assert printer.texts[-1] == "half a line"
    assert {attempt for _, attempt, text in printer.lines if text in numbered[:500]} == {1}
    assert len(far.pipes) > 5
    assert sum("trying again" in line for line in said) == sum(
        "reachable again" in line for line in said
    )
    assert said.count("--- worker-0: attempt 2 ---") == 1
    assert said[-1] == "--- worker-0 exited (exit code 0) ---"


def test_a_host_that_is_away_holds_up_no_other(
    tmp_path: Path, here: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_FIRST_RETRY", 0.01)
    monkeypatch.setattr(logs, "_LONGEST_RETRY", 0.05)
    there = python_process(tmp_path, "print('there')")
    away = replace(python_process(tmp_path, "print('away')", "worker-1"), host="away")
    for process in (there, away):
        SessionSupervisor(LocalConnection(), "r").start_process(process)
    here.add("away")
    printer, said = Collector(), list[str]()

    def come_back(line: str) -> None:
        here.clear()

    printer.hook = come_back
    LogReader(RunMonitor(run_of(away, there)), [away, there], printer, Selection()).follow(
        said.append
    )
    assert printer.texts == ["there", "away"]
    assert said.count("--- worker-1: host away: no route; trying again ---") == 1
    assert "--- worker-1: away is reachable again ---" in said


def test_what_watches_the_others_ends_with_following(tmp_path: Path, here: set[str]) -> None:
    followed, other = python_process(tmp_path, "print(1)"), python_process(tmp_path, "", "worker-1")
    SessionSupervisor(LocalConnection(), "r").start_process(followed)
    before, printer = {*threading.enumerate()}, Collector()
    printer.hook = lambda _: started.update({*threading.enumerate()} - before)
    started: set[threading.Thread] = set()
    reader = LogReader(RunMonitor(run_of(followed, other)), [followed], printer, Selection())
    reader.follow(lambda _: None)
    assert started
    wait_for(lambda: not any(thread.is_alive() for thread in started), "their end")


def test_what_a_thread_runs_into_is_raised(tmp_path: Path, here: set[str]) -> None:
    process = python_process(tmp_path, "")
    write(process, 1, b"x\n")
    reader = LogReader(RunMonitor(run_of(process)), [process], Collector(), Selection(attempt=4))
    with pytest.raises(ConfigError, match="no attempt 4"):
        reader.follow(lambda _: None)


def test_the_supervisor_marks_its_log(tmp_path: Path, here: set[str]) -> None:
    process = python_process(tmp_path, "print('hello')")
    supervisor = SessionSupervisor(LocalConnection(), "r")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    state = supervisor.read_state(process)
    assert state.started is not None
    assert supervisor.log_offset(process, 1, state.started - 1.0) == 0
    assert supervisor.log_offset(process, 1, state.started + 600.0) == len(b"hello\n")
