"""A student beside its teacher: shards that are late, never come, or are damaged."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.trainer.bigram_teacher import BigramTeacher
from tests.trainer.course import Course
from trainer.checkpoint.reader import find_checkpoint, read_progress
from trainer.system.errors import UnreachableError
from trainer.tracking.status import read_status


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
    assert max(growing.steps("waited_seconds")) > 0.3


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


def test_a_dead_teacher_is_named_and_what_was_learned_is_saved(
    model: Path, teacher: BigramTeacher, tmp_path: Path
) -> None:
    teacher.write(tmp_path / "logits", range(4))
    course = Course(tmp_path / "out", model, tmp_path / "logits", checkpoint__every=1000)
    with pytest.raises(UnreachableError, match="shard-00004 is missing"):
        course.run(timeout=0.5)
    learned = course.steps("step")[-1]
    assert learned == 4 * 6 // 5
    assert read_progress(find_checkpoint(course.output)).step == learned
    status = read_status(course.output / "status.json")
    assert status["state"] == "failed"
    assert "shard-00004" in status["reason"]
    teacher.write(tmp_path / "logits", [4, 5])
    assert course.run() == 0
    assert course.steps("step")[learned:] == list(range(learned + 1, 17))


def test_a_damaged_shard_comes_once_and_last(
    model: Path, teacher: BigramTeacher, logits: Path, tmp_path: Path
) -> None:
    file = logits / "shard-00001" / "logits.parquet"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    course = Course(tmp_path / "out", model, logits, training__epochs=1, training__batch_size=6)

    def redo() -> None:
        while not (logits / "requests" / "shard-00001.json").exists():
            time_passes.wait(0.05)
        teacher.write(logits, [1])

    time_passes = threading.Event()
    writer = threading.Thread(target=redo)
    writer.start()
    assert course.run() == 0
    writer.join()
    assert len(list((logits / "quarantine").iterdir())) == 1
    (event,) = course.events("quarantined")
    assert "shard-00001/logits.parquet: its bytes are not those in the manifest" in event["reason"]
    assert len(course.steps()) == 6
    assert not list((logits / "requests").iterdir())
