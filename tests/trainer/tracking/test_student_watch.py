"""When a teacher or an eval runner ends with a student that has a budget."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.trainer.clock import Clock
from trainer.system.process.interruption import Interrupted, Interruption
from trainer.system.storage import lease
from trainer.system.storage.lease_folder import lease_path, write_heartbeat
from trainer.tracking import student_watch
from trainer.tracking.status import RunState, StatusFile, first_status
from trainer.tracking.student_watch import StudentWatch, ends_with_student


def say(folder: Path, state: RunState, exit_code: int | None) -> None:
    status = first_status("run", 10, 1)
    status.update(state=state, exit_code=exit_code)
    StatusFile(folder).write_if_due(status)


@pytest.mark.parametrize(
    ("state", "exit_code", "teacher", "runner"),
    [
        ("running", None, False, False),
        ("stopped", 9, True, True),
        ("stopped", 0, True, True),
        ("failed", 5, True, True),
        ("failed", 3, False, False),  # it is started again
        ("completed", 0, True, False),  # it has waited for the scores
    ],
)
def test_the_ends_of_a_run(
    tmp_path: Path, state: RunState, exit_code: int | None, teacher: bool, runner: bool
) -> None:
    say(tmp_path, state, exit_code)
    for wanted, unless_completed in ((teacher, False), (runner, True)):
        watch = StudentWatch(tmp_path, unless_completed=unless_completed)
        assert watch.reason == ("the student's run is over" if wanted else "")


def test_silence_is_measured_from_the_last_sign_of_life(tmp_path: Path) -> None:
    clock = Clock(50.0)
    watch = StudentWatch(tmp_path / "output", clock=clock)
    clock.now += 899
    assert not watch.reason, "there is no folder yet: it may be made"
    held = lease.acquire_lease(tmp_path / "output", "run")
    assert not watch.reason
    for count in range(1, 4):
        clock.now += 899
        write_heartbeat(lease_path(tmp_path / "output", 1), count)
        assert not watch.reason
    held.release()
    clock.now += 899
    again = lease.acquire_lease(tmp_path / "output", "run")  # the next attempt
    assert not watch.reason
    clock.now += 900
    assert watch.reason == "no update of the student for 900 s, while its budget is spent"
    again.release()


def test_a_process_that_computes_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(student_watch, "_LOOK_EVERY", 0.01)
    interruption = Interruption()
    before = signal.getsignal(signal.SIGTERM)

    def compute() -> None:
        watch = StudentWatch(tmp_path)
        with (
            interruption.handle_signals(),
            ends_with_student(watch, interruption),
            interruption.allow_signals(),
        ):
            say(tmp_path, "stopped", 9)
            time.sleep(600)

    with pytest.raises(Interrupted, match="the student's run is over"):
        compute()
    assert signal.getsignal(signal.SIGTERM) is before
