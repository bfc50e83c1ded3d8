"""The wait for a start: a process that reports progress is waited for, one that hangs is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from launcher.errors import PartialError
from launcher.runs import join
from launcher.runs.join import pause_after, wait_until_joined
from launcher.runs.status import RunMonitor
from tests.launcher.runs import test_status
from tests.launcher.runs.test_status import Distillation

distillation = test_status.distillation
TIMEOUT = 60.0


class Clock:
    """Each pause takes 20 s, in which something may happen."""

    def __init__(self, happens: Callable[[int], object]) -> None:
        self.looks, self._happens = 0, happens

    def monotonic(self) -> float:
        return 20.0 * self.looks

    def sleep(self, _seconds: float) -> None:
        self.looks += 1
        self._happens(self.looks)


def test_progress_is_a_sign_of_life(
    distillation: Distillation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(look: int) -> None:
        if look < 20:
            rows = f"reading train.jsonl: {look},000 of 20,000 rows, {20 - look} s left"
            distillation.supervisor("teacher-0", "running", progress=rows)
            return
        distillation.supervisor("teacher-0", "running", progress=None)
        distillation.student_says("running")
        distillation.teacher_says(distillation.pid, done=1)

    clock, lines = Clock(reads), list[str]()
    monkeypatch.setattr(join, "time", clock)
    wait_until_joined(distillation.run, TIMEOUT, lines.append)
    assert clock.looks == 20
    assert "teacher-0: reading train.jsonl: 1,000 of 20,000 rows, 19 s left" in lines


def test_a_wait_of_half_an_hour_looks_some_two_thousand_times() -> None:
    looks, waited = 0, 0.0
    while waited < 1800:
        waited += pause_after(waited)
        looks += 1
    assert looks < 2000
    assert pause_after(0) == pause_after(1) == 0.1, "a short wait ends at once"


@pytest.mark.parametrize("read", [0, 5])
def test_who_hangs_while_reading_meets_the_deadline(
    distillation: Distillation, monkeypatch: pytest.MonkeyPatch, read: int
) -> None:
    def hangs(look: int) -> None:
        rows = f"reading train.jsonl: {min(look, read)},000 rows"
        distillation.supervisor("teacher-0", "running", progress=rows if read else None)

    clock = Clock(hangs)
    monkeypatch.setattr(join, "time", clock)
    with pytest.raises(PartialError, match=r"have joined within 60 s; missing: teacher-0"):
        wait_until_joined(distillation.run, TIMEOUT, lambda _line: None)
    assert clock.looks == read + 4, "60 s after its last sign of life"


def test_the_status_shows_who_reads(distillation: Distillation) -> None:
    distillation.supervisor("teacher-0", "running", progress="reading a: 5 of 9 rows, 4 s left")
    view = RunMonitor(distillation.run).observe()
    assert "teacher-0: reading a: 5 of 9 rows, 4 s left" in view.remarks
    distillation.supervisor("teacher-0", "exited", progress="reading a: 5 of 9 rows, 4 s left")
    assert not any("reading" in line for line in RunMonitor(distillation.run).observe().remarks)
