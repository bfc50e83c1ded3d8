"""Which attempts may compute on another device than they were told to."""

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.hosts.local import LocalConnection
from launcher.runs.processes.session import SessionSupervisor
from launcher.session.processes import find_run, send_signal
from launcher.session.spec import RestartPolicy
from tests.launcher.keeping import ForkingSupervisor, python_process
from tests.waiting import wait_for
from trainer.system.process.child import FALLBACK_VARIABLE

pytestmark = pytest.mark.cluster

SLEEP = "import time\nwhile True: time.sleep(60)"


@pytest.fixture
def run_id() -> Iterator[str]:
    """Yield a run id, and end what a failed test left."""
    name = f"test-{secrets.token_hex(4)}"
    yield name
    for process in find_run(name):
        send_signal(process, signal.SIGKILL)


@pytest.mark.parametrize("kind", [SessionSupervisor, ForkingSupervisor])
def test_only_an_attempt_after_a_failure_may_fall_back(
    kind: type[SessionSupervisor], run_id: str, tmp_path: Path
) -> None:
    """A start by hand asks for the device again, however often the process was started before."""
    code = f"import os\nprint('may:', os.environ.get({FALLBACK_VARIABLE!r}))\nraise SystemExit(7)"
    restart = RestartPolicy(first_delay=0.01, max_failures=2)
    supervisor = kind(LocalConnection(), run_id, restart)
    process = python_process(tmp_path, code)
    for first in (1, 3):
        supervisor.start_process(process)
        wait_for(lambda: supervisor.read_state(process).is_over, "the end")
        said = [supervisor.read_log(process, attempt) for attempt in (first, first + 1)]
        assert said == [b"may: None\n", b"may: 1\n"]


def test_a_process_that_a_boot_goes_on_with_may_fall_back(run_id: str, tmp_path: Path) -> None:
    code = f"import os\nprint('may:', os.environ.get({FALLBACK_VARIABLE!r}))\n{SLEEP}"
    supervisor = SessionSupervisor(LocalConnection(), run_id)
    process = python_process(tmp_path, code)
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_log(process, 1) == b"may: None\n", "the first line")
    supervisor_process = supervisor.read_state(process).supervisor
    assert supervisor_process is not None
    send_signal(supervisor_process, signal.SIGKILL)
    wait_for(lambda: not find_run(run_id), "supervisor and child to be gone")
    supervisor.start_supervisor(process)
    wait_for(lambda: supervisor.read_log(process, 2) == b"may: 1\n", "the next line")
    supervisor.stop_processes([process], 20.0)
