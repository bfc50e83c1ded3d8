"""A student beside its teacher: shards that are late or never come."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.trainer.bigram_teacher import BigramTeacher
from tests.trainer.course import Course
from trainer.distill.logits.dataset import TEACHERS, LogitsFolder
from trainer.distill.logits.heartbeat import TeacherHeartbeat
from trainer.system.errors import UnreachableError
from trainer.tracking.status import read_status

pytestmark = pytest.mark.cluster


def test_it_trains_while_the_teacher_writes(
    model: Path, teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    """Nothing is there at first; shards come late and out of order; the result is the same."""
    whole = Course(tmp_path / "whole", model, logits)
    assert whole.run() == 0
    growing = Course(tmp_path / "growing", model, tmp_path / "growing-logits")

    def write() -> None:
        for number in (3, 1, 0, 2, 5, 4):
            time_passes.wait(0.5)
            teacher.write(tmp_path / "growing-logits", [number])

    time_passes = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    assert growing.run() == 0
    writer.join()
    assert growing.steps() == whole.steps()
    reasons = [event["reason"] for event in growing.events("waiting")]
    assert any("for shard-0000" in reason for reason in reasons)
    assert max(growing.steps("teacher_wait_seconds")) > 0.3


def test_a_teacher_that_never_comes(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    course = Course(tmp_path / "out", model, tmp_path / "logits")
    with pytest.raises(UnreachableError, match=r"no teacher has started here within 0\.1 s"):
        course.run(timeout=0.1)
    status = read_status(course.output / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert "no teacher has started" in status["reason"]
    assert f"waiting for {tmp_path / 'logits' / 'dataset.json'}" in caplog.text


def test_a_teacher_that_was_refused_before_it_wrote(model: Path, tmp_path: Path) -> None:
    (tmp_path / "logits" / TEACHERS).mkdir(parents=True)
    TeacherHeartbeat(LogitsFolder(tmp_path / "logits"), "intel").report_failure(
        "0.4 nats off; use torch"
    )
    course = Course(tmp_path / "out", model, tmp_path / "logits")
    with pytest.raises(UnreachableError, match=r"\(intel 0\.4 nats off; use torch\)"):
        course.run(timeout=0.1)
