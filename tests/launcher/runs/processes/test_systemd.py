"""What only units do: they come back, also after a reboot, and are wanted until they are over."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import PartialError, PreflightError
from launcher.hosts.local import LocalConnection
from launcher.plan.plan import ProcessPlan, unit_name
from launcher.plan.plan_context import SCRIPT_FILE
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.processes.systemd import SystemdSupervisor, open_supervisor
from launcher.session.process_supervisor import is_final
from launcher.session.processes import find_run, send_signal
from launcher.session.spec import RestartPolicy
from tests.launcher.keeping import python_process, wait_until_running
from tests.launcher.unit_host import UnitHost
from tests.trainer.script_run import script_config, write_script
from tests.waiting import wait_for
from trainer.config.script import read_script
from trainer.system.errors import RefusedError

pytestmark = pytest.mark.cluster

QUICK = RestartPolicy(first_delay=0.01, max_delay=0.05, max_failures=4)
UP = "import time\nprint('up')\nwhile True: time.sleep(60)"


class Place:
    """A host with units, and a process of a run on it."""

    def __init__(self, folder: Path, program: str = sys.executable) -> None:
        self.run_id = f"test-{secrets.token_hex(4)}"
        self.home = folder / "runs" / self.run_id / "processes"
        self.host = UnitHost(folder, program)
        self.supervisor = SystemdSupervisor(self.host, self.run_id, QUICK)

    def process(self, code: str = UP, name: str = "worker-0") -> ProcessPlan:
        return python_process(self.home, code, name)

    def up(self, process: ProcessPlan, attempt: int = 1) -> None:
        wait_until_running(self.supervisor, process, attempt)
        wait_for(lambda: b"up\n" in self.supervisor.read_log(process, attempt), f"{attempt}")

    def run_supervisor(self, process: ProcessPlan) -> subprocess.CompletedProcess[str]:
        instance = f"{self.run_id}:{process.name}"
        return subprocess.run(
            [sys.executable, "-P", "-m", "launcher.session", "--instance", instance],
            env=os.environ | {"MOTLEY_STATE_DIR": str(self.home.parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.host.close()
    wait_for(lambda: not find_run(made.run_id), "everything is gone", seconds=10.0)


def test_where_there_are_units_they_are_used(place: Place) -> None:
    assert isinstance(open_supervisor(place.host, place.run_id), SystemdSupervisor)
    assert type(open_supervisor(LocalConnection(), place.run_id)) is SessionSupervisor


def test_units_are_named_by_run_and_process(place: Place) -> None:
    worker = place.process(name="worker-12")
    head = replace(place.process(name="coordinator"), role="coordinator")
    assert unit_name("demo-1", worker) == "motley-worker@demo-1:worker-12.service"
    assert unit_name("demo-1", head) == "motley-coordinator@demo-1:coordinator.service"
    teacher = replace(place.process(name="teacher-0"), role="teacher")
    assert unit_name("demo-1", teacher) == "motley-worker@demo-1:teacher-0.service"


def test_a_unit_is_wanted_from_start_to_stop(place: Place) -> None:
    process = place.process()
    unit = unit_name(place.run_id, process)
    place.supervisor.start_process(process)
    place.up(process)
    assert place.host.unit(unit).enabled
    place.supervisor.stop_processes([process], 20.0)
    assert place.supervisor.read_state(process).state == "stopped"
    assert not place.host.unit(unit).enabled
    place.supervisor.stop_processes([process], 20.0)
    assert place.host.asked == [("start", unit), ("stop", unit)]


def test_a_killed_supervisor_comes_back_with_the_next_attempt(place: Place) -> None:
    process = place.process()
    place.supervisor.start_process(process)
    place.up(process)
    supervisor = place.supervisor.read_state(process).supervisor
    assert supervisor is not None
    send_signal(supervisor, signal.SIGKILL)
    place.up(process, attempt=2)
    state = place.supervisor.read_state(process)
    assert (state.state, state.attempt) == ("running", 2)
    assert state.supervisor != supervisor
    place.supervisor.stop_processes([process], 20.0)


def test_everything_of_a_unit_carries_the_run(place: Place) -> None:
    """systemd gives all instances one environment; the supervisor adds the run's id."""
    process = place.process()
    place.supervisor.start_process(process)
    place.up(process)
    state = place.supervisor.read_state(process)
    assert state.supervisor is not None
    assert state.child is not None
    assert {state.supervisor, state.child} <= set(find_run(place.run_id))
    place.supervisor.stop_processes([process], 20.0)


def test_a_rebooted_host_goes_on_with_what_was_not_over(place: Place) -> None:
    process = place.process()
    place.supervisor.start_process(process)
    place.up(process)
    place.host.close()  # the power goes
    wait_for(lambda: not find_run(place.run_id), "darkness")
    assert place.supervisor.read_state(process).state == "lost"
    place.host.unit(
        unit_name(place.run_id, process)
    ).start()  # what systemd does with enabled units
    place.up(process, attempt=2)
    place.supervisor.stop_processes([process], 20.0)


def test_a_rebooted_host_goes_on_with_the_script_that_the_start_named(
    place: Place, tmp_path: Path
) -> None:
    """The unit's command has the copy's digest: the next attempt refuses another copy."""
    place.home.parent.mkdir(parents=True)
    copy = write_script(place.home.parent / SCRIPT_FILE)
    run = script_config(tmp_path / "out", training__max_steps=100_000, checkpoint__every=10)
    (tmp_path / "run.yaml").write_text(run.to_yaml(exclude_unset=True))
    command = ["finetune", "--config", str(tmp_path / "run.yaml"), "--gpu-backend", "cpu"]
    command += ["--script", str(copy), "--script-digest", read_script(copy).digest]
    argv = (sys.executable, "-P", "-m", "trainer.cli", *command)
    process = replace(place.process(), argv=argv)
    unit = place.host.unit(unit_name(place.run_id, process))
    metrics = tmp_path / "out/metrics.jsonl"
    place.supervisor.start_process(process)
    wait_for(lambda: metrics.exists() and '"checkpoint"' in metrics.read_text(), "a checkpoint")
    place.host.close()
    wait_for(lambda: not find_run(place.run_id), "darkness")
    unit.start()
    wait_for(lambda: '"resumed"' in metrics.read_text(), "the next attempt")
    place.host.close()
    wait_for(lambda: not find_run(place.run_id), "darkness")
    copy.write_text(copy.read_text() + "#")
    unit.start()
    wait_for(lambda: place.supervisor.read_state(process).is_over, "the refusal")
    assert place.supervisor.read_state(process).exit_code == RefusedError.exit_code


def test_a_host_that_is_shut_down_in_order_ends_nothing_for_good(place: Place) -> None:
    """Its units get the SIGTERM of whoever stops them, but they stay wanted."""
    process = place.process()
    unit = place.host.unit(unit_name(place.run_id, process))
    place.supervisor.start_process(process)
    place.up(process)
    unit.go_down_with_the_host()
    assert not find_run(place.run_id)
    assert not is_final(Path(process.folder) / "state.json")
    unit.start()  # the next boot
    place.up(process, attempt=2)
    place.supervisor.stop_processes([process], 20.0)
    assert place.supervisor.read_state(process).state == "stopped"


def test_a_rebooted_host_is_waited_for_while_its_units_have_not_had_their_turn(
    place: Place,
) -> None:
    process = place.process()
    place.supervisor.start_process(process)
    place.up(process)
    place.host.close()
    place.host.unit(unit_name(place.run_id, process)).enable()
    path = Path(process.folder) / "state.json"
    supervisor = place.supervisor.read_state(process).supervisor
    assert supervisor is not None
    path.write_text(path.read_text().replace(supervisor.boot, "the-boot-before"))
    assert place.supervisor.read_state(process).state == "starting"


def test_what_is_over_is_not_started_again(place: Place) -> None:
    process = place.process("print('done')")
    place.supervisor.start_process(process)
    wait_for(lambda: place.supervisor.read_state(process).is_over, "the end")
    done = place.run_supervisor(process)
    assert (done.returncode, done.stderr) == (0, "")
    assert place.supervisor.list_attempts(process) == [1]
    (Path(process.folder) / "spec.json").unlink()
    assert place.run_supervisor(process).returncode == 0
    assert place.supervisor.list_attempts(process) == [1]


def test_a_run_that_was_taken_down_is_not_started_again(place: Place) -> None:
    process = place.process()
    (place.home.parent).mkdir(parents=True)
    (place.home.parent / "down").touch()
    place.supervisor.start_process(process)
    wait_for(lambda: place.supervisor.read_state(process).is_over, "the end")
    state = place.supervisor.read_state(process)
    assert (state.state, state.message) == ("stopped", "the run was stopped")
    assert place.supervisor.list_attempts(process) == []


@pytest.mark.parametrize("name", ["student", "teacher-0", "evaluator-0", "coordinator"])
def test_every_process_of_a_run_can_be_an_instance(tmp_path: Path, name: str) -> None:
    """One that was never started has nothing to take up after a reboot, and that is no error."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.session", "--instance", f"demo-1:{name}"],
        env=os.environ | {"MOTLEY_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("instance", ["x", "../x:worker-0", "x:worker-0/../..", "x:else", ""])
def test_an_instance_is_a_run_and_a_process(tmp_path: Path, instance: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "launcher.session", "--instance", instance],
        env=os.environ | {"MOTLEY_STATE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "usage: python -P -m launcher.session" in done.stderr


def test_a_unit_that_does_not_start_is_said_with_systemds_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runs.processes.session._START_DEADLINE", 0.1)
    place = Place(tmp_path, program="/bin/true")
    with pytest.raises(PartialError, match=r"worker-0: its unit did not start \(.*dead, success"):
        place.supervisor.start_process(place.process())


def test_where_systemd_refuses_the_process_is_ended_without_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = os.waitpid

    def wait_and_pause(pid: int, options: int) -> tuple[int, int]:
        ended = wait(pid, options)
        if not options:  # the thread that waits for the supervisor gets no processor for a while
            time.sleep(1.0)
        return ended

    def refuse(verb: str, unit: str, _deadline: float = 1.0) -> None:
        raise PreflightError(f"cannot {verb} {unit}")

    monkeypatch.setattr(os, "waitpid", wait_and_pause)
    process = place.process()
    place.supervisor.start_process(process)
    place.up(process)
    monkeypatch.setattr(place.host, "control_unit", refuse)
    place.supervisor.stop_processes([process], 20.0)
    assert place.supervisor.read_state(process).is_over
    assert not find_run(place.run_id)


def test_a_process_started_before_the_host_had_units_can_be_stopped(place: Place) -> None:
    process = place.process()
    SessionSupervisor(place.host, place.run_id, QUICK).start_process(process)
    place.up(process)
    place.supervisor.stop_processes([process], 20.0)
    assert place.supervisor.read_state(process).state == "stopped"
    assert place.host.asked == []
