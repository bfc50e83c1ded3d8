"""A program that forks a child for each attempt under a supervisor; programs that cannot."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.hosts.local import LocalConnection
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import SessionSupervisor
from launcher.session.processes import find_run, identify_process, send_signal
from launcher.session.spec import RestartPolicy
from tests.launcher.keeping import python_process, wait_until_running
from tests.waiting import wait_for
from trainer.commands.finetune import finetune
from trainer.system.process.child import PARENT_VARIABLE

pytestmark = pytest.mark.cluster

QUICK = RestartPolicy(first_delay=0.01, max_delay=0.05, max_failures=4)
LOAD = """\
from trainer.system.process.prefork import fork_workers
fork_workers(lambda: print('imported'))
"""
SLEEP = "import time\nwhile True: time.sleep(60)"


@pytest.fixture
def supervisor() -> Iterator[SessionSupervisor]:
    """Yield a supervisor of a run, and prove afterwards that nothing of it is left."""
    run_id = f"test-{secrets.token_hex(4)}"
    yield SessionSupervisor(LocalConnection(), run_id, QUICK)
    try:
        wait_for(lambda: not find_run(run_id), "everything is gone", seconds=10.0)
    finally:
        for process in find_run(run_id):
            send_signal(process, signal.SIGKILL)


def wait_for_line(supervisor: SessionSupervisor, process: ProcessPlan, attempt: int) -> bytes:
    wait_until_running(supervisor, process, attempt)
    wait_for(lambda: supervisor.read_log(process, attempt).endswith(b"up\n"), f"attempt {attempt}")
    return supervisor.read_log(process, attempt)


def kill(supervisor: SessionSupervisor, process: ProcessPlan) -> None:
    child = supervisor.read_state(process).child
    assert child is not None
    send_signal(child, signal.SIGKILL)


def test_what_was_imported_once_serves_every_attempt(
    supervisor: SessionSupervisor, tmp_path: Path
) -> None:
    process = python_process(tmp_path, f"{LOAD}print('up')\n{SLEEP}")
    supervisor.start_process(process)
    assert wait_for_line(supervisor, process, 1) == b"imported\nup\n"
    for attempt in (2, 3):
        kill(supervisor, process)
        assert wait_for_line(supervisor, process, attempt) == b"up\n"
        state = supervisor.read_state(process)
        assert (state.attempt, state.signal) == (attempt, signal.SIGKILL)
    supervisor.stop_processes([process], 20.0)


def test_a_forked_child_is_like_any_other(supervisor: SessionSupervisor, tmp_path: Path) -> None:
    code = (
        "import glob, json, os, random, signal, sys, threading\n"
        "print(json.dumps({\n"
        " 'pid': os.getpid(), 'ppid': os.getppid(), 'group': os.getpgid(0),\n"
        " 'blocked': [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],\n"
        " 'files': [os.path.realpath(f) for f in glob.glob('/proc/self/fd/*')],\n"
        " 'folder': os.getcwd(), 'draw': random.random(), 'stdin': sys.stdin.read(),\n"
        " 'told': os.environ.get('MOTLEY_PARENT')}))\n"
        "print('up', file=sys.stderr, flush=True)\n"
    )
    process = python_process(tmp_path, f"{LOAD}{code}{SLEEP}")
    supervisor.start_process(process)
    seen = [json.loads(wait_for_line(supervisor, process, 1).splitlines()[1])]
    kill(supervisor, process)
    seen.append(json.loads(wait_for_line(supervisor, process, 2).splitlines()[0]))
    state = supervisor.read_state(process)
    assert state.supervisor is not None
    for facts in seen:
        assert facts["ppid"] == state.supervisor.pid
        assert facts["group"] == facts["pid"]
        assert facts["folder"] == process.folder
        assert (facts["blocked"], facts["stdin"]) == ([], "")
        assert facts["told"] is None
        # libffi 3.5 keeps its own file open, to map it again; glob's folder is closed by then.
        files = [file for file in facts["files"] if "libffi" not in file and "/fd" not in file]
        assert len(files) == 3, files  # the streams
    assert seen[0]["draw"] != seen[1]["draw"]
    assert state.child == identify_process(seen[1]["pid"])
    supervisor.stop_processes([process], 20.0)


def test_a_parent_that_dies_is_replaced(supervisor: SessionSupervisor, tmp_path: Path) -> None:
    """The child goes on meanwhile; the next attempt starts from nothing."""
    process = python_process(tmp_path, f"{LOAD}print('up')\n{SLEEP}")
    supervisor.start_process(process)
    wait_for_line(supervisor, process, 1)
    state = supervisor.read_state(process)
    assert state.supervisor is not None
    members = {p.pid for p in find_run(supervisor.run_id)}
    (parent,) = members - {state.supervisor.pid, state.child.pid if state.child else 0}
    os.kill(parent, signal.SIGKILL)
    wait_for(lambda: identify_process(parent) is None, "the parent's end")
    assert supervisor.read_state(process).child == state.child
    assert supervisor.read_state(process).attempt == 1
    kill(supervisor, process)
    assert wait_for_line(supervisor, process, 2) == b"imported\nup\n"
    supervisor.stop_processes([process], 20.0)


def test_a_killed_supervisor_takes_parent_and_child_along(
    supervisor: SessionSupervisor, tmp_path: Path
) -> None:
    process = python_process(tmp_path, f"{LOAD}print('up')\n{SLEEP}")
    supervisor.start_process(process)
    wait_for_line(supervisor, process, 1)
    state = supervisor.read_state(process)
    assert state.supervisor is not None
    send_signal(state.supervisor, signal.SIGKILL)
    wait_for(lambda: not find_run(supervisor.run_id), "everything to be gone")
    assert supervisor.read_state(process).state == "lost"


@pytest.mark.parametrize(
    "load",
    [
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
        "import sys\nsys.platform = 'darwin'\n",
    ],
    ids=["a second thread", "another system"],
)
def test_where_a_fork_is_not_sound_each_attempt_starts_from_nothing(
    supervisor: SessionSupervisor, tmp_path: Path, load: str
) -> None:
    process = python_process(tmp_path, f"print('new')\n{load}{LOAD}print('up')\n{SLEEP}")
    supervisor.start_process(process)
    assert b"new" in wait_for_line(supervisor, process, 1)
    first = supervisor.read_state(process).child
    kill(supervisor, process)
    assert b"new" in wait_for_line(supervisor, process, 2)
    assert supervisor.read_state(process).child != first
    supervisor.stop_processes([process], 20.0)


def test_a_worker_that_another_process_started_forks_nothing(tmp_path: Path) -> None:
    """The variable is inherited, by the workers of a coordinator with --gpus for example."""
    environment = {**os.environ, PARENT_VARIABLE: f"{os.getpid()}:99"}
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {LOAD!r}], check=True)"
    done = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", code], environment)
    assert done == 0


@pytest.mark.parametrize("backend", ["cpu", "auto", "wgpu"])
def test_a_worker_s_imports_leave_one_thread(
    supervisor: SessionSupervisor, tmp_path: Path, backend: str
) -> None:
    """The command that a real worker is started with gets as far as its config in the child."""
    pytest.importorskip("torch", reason="the launcher-only install has none")
    assert finetune.name == "finetune"
    words = ["finetune", "--role", "worker", "--config", "nope", "--gpu-backend", backend]
    argv = (sys.executable, "-P", "-m", "trainer.cli", *words)
    process = replace(python_process(tmp_path, ""), argv=argv, env={"OMP_NUM_THREADS": "2"})
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end", seconds=120.0)
    assert supervisor.read_state(process).exit_code == 2
    log = supervisor.read_log(process, 1)
    assert b"no config file and no preset 'nope'" in log
    assert b"threads run" not in log
