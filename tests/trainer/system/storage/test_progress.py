"""Progress is a line with what is left, in the log and in the file that a supervisor names."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trainer.system.process.child import PROGRESS_VARIABLE
from trainer.system.storage import progress
from trainer.system.storage.progress import Progress, reported


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_says_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, lines = Clock(), list[str]()
    counted = Progress("reading train.jsonl", 1_000_000, lines.append, clock)
    for _ in range(20):
        clock.now += 1.0
        counted.advance(20_600)
    assert counted.line == "reading train.jsonl: 412,000 of 1,000,000 rows, 29 s left"
    assert lines[-1] == counted.line
    assert len(lines) == 20, "one a second"
    assert [record.message for record in caplog.records] == [lines[9], lines[19]]


def test_rows_beyond_the_total_or_without_one_are_counted_alone() -> None:
    for total in (None, 10):
        counted = Progress("reading a.parquet", total, lambda _line: None, Clock())
        counted.advance(2_000)
        assert counted.line == "reading a.parquet: 2,000 rows"
    assert Progress("reading a", 5, lambda _line: None, Clock()).line == "reading a: 0 of 5 rows"


def test_the_file_of_a_supervisor_holds_the_line_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)
    with reported("reading a", 3000) as counted:
        counted.advance(1000)
        assert path.read_text().startswith("reading a: 1,000 of 3,000 rows, ")
        counted.advance(2000)
        assert path.read_text() == "reading a: 3,000 of 3,000 rows, 0 s left"
    assert not path.exists()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "gone" / "progress"))
    with reported("reading a") as counted:  # what cannot be written does not end the reading
        counted.advance(1000)
