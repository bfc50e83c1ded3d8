"""How long a process may take to end, and that one which saves is given the time for it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.hosts.local import LocalConnection
from launcher.runs import down
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.processes.systemd import SystemdSupervisor
from launcher.session.spec import SAVING, RestartPolicy, SessionSpec
from tests.launcher.keeping import asked_to_stop, python_process
from tests.launcher.unit_host import UnitHost
from tests.waiting import wait_for
from trainer.exchange.coordinator import membership
from trainer.exchange.transport import link

pytestmark = pytest.mark.cluster

SLEEP = "import time\nwhile True: time.sleep(60)"
Make = Callable[[float], SessionSupervisor]


@pytest.fixture(params=["session", "units"])
def make(request: pytest.FixtureRequest, run_id: str, tmp_path: Path) -> Iterator[Make]:
    """Return a maker of supervisors by their supervisors' grace."""
    units = request.param == "units"
    connection = UnitHost(tmp_path) if units else LocalConnection()
    kind = SystemdSupervisor if units else SessionSupervisor

    def build(grace: float) -> SessionSupervisor:
        return kind(connection, run_id, RestartPolicy(), grace)

    yield build
    connection.close()  # a unit that fails is started again as long as it is wanted


def saving(seconds: float, then: str = "os._exit(0)") -> str:
    """Return code that is asked to stop in the middle of a save, which goes on for some seconds.

    It ends with its save: to take the mark away first is a race against the grace that follows.
    """
    return f"""
import os, pathlib, time
mark = pathlib.Path(os.environ["MOTLEY_SAVING"])
mark.touch()
{asked_to_stop("up")}
time.sleep({seconds})
pathlib.Path("saved").touch()
{then}
"""


def test_a_process_that_saves_is_given_the_time(make: Make, home: Path) -> None:
    """Far more than the grace of its supervisor, and than the launcher's own."""
    supervisor = make(0.2)
    process = python_process(home, saving(3))
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    supervisor.stop_processes([process], 1.0)
    state = supervisor.read_state(process)
    assert (state.state, state.exit_code, state.signal) == ("stopped", 0, None)
    assert Path(process.folder, "saved").exists()


@pytest.mark.long
def test_a_save_that_has_ended_is_followed_by_the_grace_once_more(make: Make, home: Path) -> None:
    supervisor = make(3.0)
    process = python_process(home, saving(3.5, "mark.unlink()\ntime.sleep(0.5)\nos._exit(0)"))
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    supervisor.stop_processes([process], 3.0)
    state = supervisor.read_state(process)
    assert (state.state, state.exit_code, state.signal) == ("stopped", 0, None)


def test_a_save_without_end_is_not_waited_for_forever(
    make: Make, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runs.processes.session.LONGEST_SAVE", 0.5)
    supervisor = make(0.2)
    process = python_process(home, saving(600))
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    supervisor.stop_processes([process], 0.2)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    assert not Path(process.folder, "saved").exists()


def test_a_mark_that_an_earlier_attempt_left_behind_buys_no_time(make: Make, home: Path) -> None:
    supervisor = make(0.2)
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\n{SLEEP}"
    process = python_process(home, code)
    mark = Path(process.folder, SAVING)
    mark.parent.mkdir(parents=True)
    mark.touch()
    supervisor.start_process(process)
    wait_for(lambda: b"deaf\n" in supervisor.read_log(process, 1), "the first line")
    assert not mark.exists()
    supervisor.stop_processes([process], 20.0)
    assert supervisor.read_state(process).signal == signal.SIGKILL


def test_the_supervisor_itself_does_not_wait_for_a_save_without_end(
    run_id: str, tmp_path: Path
) -> None:
    process = python_process(tmp_path, saving(600))
    folder = Path(process.folder)
    folder.mkdir(parents=True)
    spec = SessionSpec(
        name=process.name,
        run_id=run_id,
        argv=process.argv,
        env=dict(process.env),
        folder=str(folder),
        grace_seconds=0.2,
        max_save_seconds=0.5,
    )
    (folder / "spec.json").write_bytes(spec.to_json())
    supervisor = SessionSupervisor(LocalConnection(), run_id)
    supervisor.start_supervisor(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    supervisor.stop_processes([process], 60.0)
    state = supervisor.read_state(process)
    assert (state.state, state.signal) == ("stopped", signal.SIGKILL)


def test_every_grace_outlasts_what_a_stopped_coordinator_waits_for() -> None:
    """It gives up its step first; then its supervisor's grace ends, then the launcher's."""
    own = SessionSpec("coordinator", "run", (), {}, "").grace_seconds
    assert membership.STOP_PATIENCE + link.FLUSH < own < down.GRACE
