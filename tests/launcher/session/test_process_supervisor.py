"""The contract of a supervisor, for every implementation; then what only sessions do."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from launcher.errors import PartialError
from launcher.hosts.local import LocalConnection
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.processes.systemd import SystemdSupervisor
from launcher.session.processes import (
    ProcessIdentity,
    boot_id,
    find_run,
    identify_process,
    is_alive,
    send_signal,
)
from launcher.session.spec import RestartPolicy
from tests.covering import covering
from tests.launcher.agent_pipe import AgentHost
from tests.launcher.keeping import (
    ForkingSupervisor,
    asked_to_stop,
    python_process,
    wait_until_running,
)
from tests.launcher.unit_host import UnitHost
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

QUICK = RestartPolicy(first_delay=0.01, max_delay=0.05, max_failures=4)
SLEEP = "import time\nwhile True: time.sleep(60)"
Make = Callable[..., SessionSupervisor]


KINDS = ("session", "session that forks", "session of an agent", "units")


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, run_id: str, tmp_path: Path) -> Iterator[Make]:
    """Return a maker of supervisors; every implementation is a parameter."""
    host = AgentHost()
    kinds = {"units": SystemdSupervisor, "session that forks": ForkingSupervisor}
    kind = kinds.get(request.param, SessionSupervisor)
    local = UnitHost(tmp_path) if request.param == "units" else LocalConnection()
    connection = host.connect() if "agent" in request.param else local

    def build(restart: RestartPolicy = QUICK, grace: float = 10.0) -> SessionSupervisor:
        return kind(connection, run_id, restart, grace)

    yield build
    connection.close()
    host.end()


def test_a_process_that_was_never_started_is_absent(make: Make, home: Path) -> None:
    process = python_process(home, SLEEP)
    assert make().read_state(process).state == "absent"
    assert make().read_state(process).is_over
    assert make().list_attempts(process) == []
    make().stop_processes([process], 5.0)


def test_it_runs_says_so_and_stops_when_asked(make: Make, home: Path) -> None:
    supervisor = make()
    process = python_process(home, f"{asked_to_stop('ready')}print('saved')")
    supervisor.start_process(process)
    wait_for(lambda: b"ready\n" in supervisor.read_log(process, 1), "the first line")
    state = wait_until_running(supervisor, process)
    assert state.child is not None
    assert is_alive(state.child)
    supervisor.stop_processes([process], 20.0)
    state = supervisor.read_state(process)
    assert (state.state, state.exit_code, state.attempt) == ("stopped", 0, 1)
    assert supervisor.read_log(process, 1) == b"ready\nsaved\n"
    assert supervisor.read_log(process, 1, 6) == b"saved\n"
    supervisor.stop_processes([process], 5.0)


def test_the_progress_of_a_child_is_in_its_state(make: Make, home: Path) -> None:
    supervisor = make()
    report = "pathlib.Path(os.environ['MOTLEY_PROGRESS']).write_text('9 rows')"
    code = f"import os, pathlib\n{report}\n{SLEEP}"
    process = python_process(home, code)
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).progress == "9 rows", "its progress")
    supervisor.stop_processes([process], 20.0)


def test_a_process_that_is_done_is_not_started_again(make: Make, home: Path) -> None:
    supervisor = make()
    process = python_process(home, "print('done')")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    state = supervisor.read_state(process)
    assert (state.state, state.exit_code, supervisor.list_attempts(process)) == ("exited", 0, [1])


def test_a_run_keeps_its_version_when_its_host_comes_back(home: Path, run_id: str) -> None:
    """`push --force` has switched `current` meanwhile; only a new start takes the new version."""
    versions, current = home / "versions", home / "current"
    for name in ("old", "new"):
        program = versions / name / "bin/trainer"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho {name}; exec sleep 1000\n")
        program.chmod(0o755)
    current.symlink_to(Path("versions") / "old")
    supervisor = SessionSupervisor(LocalConnection(), run_id, QUICK)
    process = replace(python_process(home, ""), argv=(str(current / "bin/trainer"),))
    supervisor.start_process(process)

    def crash(attempt: int) -> str:
        """Kill the supervisor, and with it the process; return what the attempt said."""

        def said() -> bytes:
            return supervisor.read_log(process, attempt)

        wait_for(lambda: said().endswith((b"old\n", b"new\n")), f"attempt {attempt}")
        supervisor_process = supervisor.read_state(process).supervisor
        assert supervisor_process is not None
        send_signal(supervisor_process, signal.SIGKILL)
        wait_for(lambda: supervisor.read_state(process).state == "lost", "the crash")
        return said().decode()

    assert crash(1) == "old\n"
    current.unlink()
    current.symlink_to(Path("versions") / "new")
    supervisor.start_supervisor(process)  # as its unit does at boot
    assert crash(2) == "old\n"
    shutil.rmtree(versions / "old")
    supervisor.start_supervisor(process)
    assert crash(3) == f"{versions}/old/bin/trainer is gone: {versions}/new/bin/trainer\nnew\n"
    (versions / "old").symlink_to("new")
    supervisor.start_process(process)  # resumed, after its end
    assert crash(4) == "new\n"


@pytest.mark.parametrize(
    ("make", "code"), covering(product(KINDS, [2, 4, 5, 9])), indirect=["make"]
)
def test_codes_that_would_repeat_themselves_end_it(make: Make, home: Path, code: int) -> None:
    """With 9 its budget has stopped it, which is no failure."""
    supervisor = make()
    process = python_process(home, f"raise SystemExit({code})")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    state = supervisor.read_state(process)
    assert (state.exit_code, state.attempt) == (code, 1)
    assert state.state == ("exited" if code == 9 else "failed")
    assert (state.message == "the budget guard stopped it") == (code == 9)


def test_other_codes_are_tried_again_and_given_up_at_last(make: Make, home: Path) -> None:
    """Each attempt ends with another code."""
    codes = (1, 3, 6, 7, 1)
    supervisor = make(replace(QUICK, max_failures=len(codes)))
    code = (
        f"with open({str(home / 'tries')!r}, 'a+b') as tries:\n"
        "    tries.write(b'x')\n    count = tries.tell()\n"
        f"print('try', count)\nraise SystemExit({codes}[count - 1])"
    )
    process = python_process(home, code)
    told = home / "told.json"
    supervisor.start_process(process, notify=("sh", "-c", 'cat > "$0"', str(told)))
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    state = supervisor.read_state(process)
    assert (state.state, state.exit_code, state.attempt) == ("failed", codes[-1], 5)
    wait_for(lambda: told.exists() and told.read_text().endswith("\n"), "the notification")
    event = json.loads(told.read_text())
    assert (event["event"], event["process"]) == ("failed", process.name)
    assert event["text"].endswith("gave up after 5 failures in a row, the last with exit code 1")
    assert supervisor.list_attempts(process) == [1, 2, 3, 4, 5]
    assert [supervisor.read_log(process, attempt) for attempt in range(1, 6)] == [
        b"try %d\n" % attempt for attempt in range(1, 6)
    ]
    assert "gave up after 5" in str(state.message)


def test_a_notification_that_fails_is_in_the_last_state(make: Make, home: Path) -> None:
    supervisor = make(replace(QUICK, max_failures=1))
    process = python_process(home, "raise SystemExit(3)")
    supervisor.start_process(process, notify=("false",))
    wait_for(lambda: supervisor.read_state(process).notify_failure is not None, "the first try")
    state = supervisor.read_state(process)
    assert (state.state, state.notify_failure) == ("failed", "failed: false: exit code 1")


def test_the_command_of_a_start_is_handed_to_its_process_and_to_no_later_start(
    make: Make, home: Path
) -> None:
    supervisor = make()
    process = python_process(home, "import os\nprint(os.environ['MOTLEY_NOTIFY'])")
    for command, handed in ((("tell", "me"), b'["tell", "me"]\n'), ((), b"[]\n")):
        supervisor.start_process(process, notify=command)
        wait_for(lambda: supervisor.read_state(process).is_over, "the end")
        assert supervisor.read_log(process, supervisor.list_attempts(process)[-1]) == handed


def test_a_killed_process_comes_back_with_a_log_of_its_own(make: Make, home: Path) -> None:
    supervisor = make()
    process = python_process(home, f"print('up')\n{SLEEP}")
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "attempt 1")
    first = wait_until_running(supervisor, process).child
    assert first is not None
    send_signal(first, signal.SIGKILL)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 2), "attempt 2")
    state = wait_until_running(supervisor, process, 2)
    assert state.signal == signal.SIGKILL
    assert state.last_end == "killed by SIGKILL"
    assert state.child != first
    supervisor.stop_processes([process], 20.0)
    assert supervisor.read_state(process).state == "stopped"


def test_a_mapped_file_that_was_cut_short_is_named_as_the_cause(make: Make, home: Path) -> None:
    supervisor = make()
    code = f"""
import mmap
with open({str(home / "weights")!r}, "w+b") as file:
    file.truncate(1 << 20)
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    mapped[1 << 19]
"""
    process = python_process(home, code)
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).signal is not None, "the end")
    ending = supervisor.read_state(process).last_end
    assert ending == "killed by SIGBUS: a file that it read was cut short, or its disk failed"
    supervisor.stop_processes([process], 20.0)


def test_a_process_that_ignores_the_request_is_killed(make: Make, home: Path) -> None:
    supervisor = make(grace=0.2)
    code = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf')\n{SLEEP}"
    process = python_process(home, code)
    supervisor.start_process(process)
    wait_for(lambda: b"deaf\n" in supervisor.read_log(process, 1), "the first line")
    supervisor.stop_processes([process], 20.0)
    state = supervisor.read_state(process)
    assert (state.state, state.signal) == ("stopped", signal.SIGKILL)


def test_a_stopped_process_can_be_ended(make: Make, home: Path) -> None:
    supervisor = make()
    process = python_process(home, f"print('up')\n{SLEEP}")
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    child = wait_until_running(supervisor, process).child
    assert child is not None
    send_signal(child, signal.SIGSTOP)
    supervisor.stop_processes([process], 20.0)
    assert supervisor.read_state(process).state == "stopped"


def test_a_request_during_the_pause_ends_it_at_once(make: Make, home: Path) -> None:
    supervisor = make(RestartPolicy(first_delay=600.0, max_delay=600.0))
    process = python_process(home, "raise SystemExit(3)")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).state == "backoff", "the pause")
    supervisor.stop_processes([process], 20.0)
    state = supervisor.read_state(process)
    assert (state.state, state.attempt, state.exit_code) == ("stopped", 1, 3)


def test_what_a_child_leaves_behind_ends_with_it(make: Make, home: Path, run_id: str) -> None:
    supervisor = make()
    code = (
        "import subprocess, sys\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "subprocess.Popen(sleep)\n"
        "subprocess.Popen(sleep, start_new_session=True)\n"
    )
    process = python_process(home, code)
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    wait_for(lambda: not find_run(run_id), "its children to be gone")


def test_a_program_that_is_missing_fails_with_a_line_in_its_log(make: Make, home: Path) -> None:
    supervisor = make()
    process = replace(python_process(home, ""), argv=("/no/such/trainer",))
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    assert supervisor.read_state(process).exit_code == 2
    assert b"cannot start /no/such/trainer: No such file" in supervisor.read_log(process, 1)


def test_no_terminal_no_stdin_and_a_process_group_of_its_own(make: Make, home: Path) -> None:
    supervisor = make()
    code = (
        "import os, sys\n"
        "print(repr(sys.stdin.read()), os.getpgid(0) == os.getpid(), os.getsid(0) != os.getpid())\n"
        "print(os.environ['MOTLEY_RUN_ID'])"
    )
    process = python_process(home, code)
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    first, second = supervisor.read_log(process, 1).decode().splitlines()
    assert first == "'' True True"
    assert second.startswith("test-")


def test_a_process_started_again_counts_on_and_keeps_its_logs(make: Make, home: Path) -> None:
    supervisor = make()
    process = python_process(home, "print('once')")
    for attempt in (1, 2):
        supervisor.start_process(process)
        wait_for(lambda: supervisor.read_state(process).is_over, "the end")
        assert supervisor.read_state(process).attempt == attempt
    assert supervisor.read_log(process, 1) == supervisor.read_log(process, 2) == b"once\n"


def test_a_process_ends_for_good_with_its_leader(make: Make, home: Path) -> None:
    """A worker killed at the very end comes back when its coordinator has finished."""
    leader = python_process(home, SLEEP, "coordinator")
    restarted = python_process(home, "print('up')\nraise SystemExit(3)", "worker-0")
    patient = python_process(home, SLEEP, "worker-1")
    supervisor = make(RestartPolicy(first_delay=0.01, max_delay=0.01), grace=0.1)
    for process in (leader, restarted, patient):
        supervisor.start_process(process, None if process is leader else leader)
    wait_for(lambda: supervisor.read_state(restarted).attempt > 2, "a few restarts")
    supervisor.stop_processes([leader], 20.0)
    wait_for(lambda: supervisor.read_state(restarted).is_over, "the restarts to end")
    wait_for(lambda: supervisor.read_state(patient).is_over, "the waiting one to be ended")
    assert supervisor.read_state(restarted).message == "the run is over"
    assert supervisor.read_state(patient).state == "stopped"


# What only sessions do.


def test_a_killed_supervisor_takes_its_child_along_and_is_reported_lost(
    run_id: str, tmp_path: Path
) -> None:
    supervisor = SessionSupervisor(LocalConnection(), run_id)
    process = python_process(tmp_path, f"print('up')\n{SLEEP}")
    supervisor.start_process(process)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    state = wait_until_running(supervisor, process)
    assert state.supervisor is not None
    send_signal(state.supervisor, signal.SIGKILL)
    wait_for(lambda: not find_run(run_id), "supervisor and child to be gone")
    assert supervisor.read_state(process).state == "lost"
    assert supervisor.read_state(process).is_over


def test_the_supervisor_survives_the_process_that_started_it(run_id: str, tmp_path: Path) -> None:
    process = python_process(tmp_path, f"print('up')\n{SLEEP}")
    starter = (
        "import sys, json\n"
        "from launcher.hosts.local import LocalConnection\n"
        "from launcher.plan.plan import ProcessPlan\n"
        "from launcher.runs.processes.session import SessionSupervisor\n"
        "plan = ProcessPlan(**json.loads(sys.argv[1]))\n"
        f"SessionSupervisor(LocalConnection(), {run_id!r}).start_process(plan)\n"
    )
    plan = json.dumps({**process.__dict__})
    subprocess.run([sys.executable, "-c", starter, plan], check=True, timeout=60)
    supervisor = SessionSupervisor(LocalConnection(), run_id)
    wait_for(lambda: b"up\n" in supervisor.read_log(process, 1), "the first line")
    supervisor_process = supervisor.read_state(process).supervisor
    assert supervisor_process is not None
    assert os.getsid(supervisor_process.pid) == supervisor_process.pid
    wait_until_running(supervisor, process)
    os.kill(supervisor_process.pid, signal.SIGHUP)
    assert supervisor.read_state(process).state == "running"
    supervisor.stop_processes([process], 20.0)


def test_a_reused_pid_is_never_taken_for_the_supervisor(run_id: str, tmp_path: Path) -> None:
    """state.json of an earlier life names a pid that is now somebody else's: ours."""
    supervisor = SessionSupervisor(LocalConnection(), run_id)
    process = python_process(tmp_path, "pass")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).is_over, "the end")
    path = Path(process.folder) / "state.json"
    tree = json.loads(path.read_text())
    me = identify_process(os.getpid())
    assert me is not None
    for stranger in ({"start": me.start - 1}, {"boot": "another-boot"}):
        identity = {"pid": me.pid, "start": me.start, "boot": me.boot, **stranger}
        path.write_text(json.dumps({**tree, "state": "running", "supervisor": identity}))
        assert supervisor.read_state(process).state == "lost"
        supervisor.stop_processes([process], 0.0)  # would kill this very test
        assert not send_signal(ProcessIdentity(**identity), signal.SIGKILL)


def test_a_supervisor_that_cannot_start_is_said_in_its_own_words(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = LocalConnection()
    monkeypatch.setattr(connection, "python", "/bin/false")
    monkeypatch.setattr("launcher.runs.processes.session._START_DEADLINE", 0.1)
    with pytest.raises(PartialError, match="worker-0: its supervisor did not start"):
        SessionSupervisor(connection, run_id).start_process(python_process(tmp_path, "pass"))


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identify_process(child.pid) is None
    child.wait()
    assert boot_id()


def test_the_pause_grows_is_jittered_and_bounded() -> None:
    policy = RestartPolicy()
    longest = [policy.draw_delay(n, lambda: 0.0) for n in range(1, 21)]
    assert longest[:4] == [0.5, 1.0, 2.0, 4.0]
    assert longest[-1] == 30.0
    assert policy.draw_delay(1, lambda: 1.0) == 0.25


def test_a_healthy_life_makes_the_count_start_again(run_id: str, tmp_path: Path) -> None:
    """With every life counted healthy it never gives up, however often it fails."""
    policy = replace(QUICK, healthy_after=0.0, max_failures=2)
    supervisor = SessionSupervisor(LocalConnection(), run_id, policy)
    process = python_process(tmp_path, "raise SystemExit(1)")
    supervisor.start_process(process)
    wait_for(lambda: supervisor.read_state(process).attempt > 4, "the fifth attempt")
    assert supervisor.read_state(process).failures <= 1
    supervisor.stop_processes([process], 20.0)
