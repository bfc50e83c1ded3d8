"""Progress is a line with what is left, in the log and in the file that a supervisor names."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from tests.cluster.held_cache import HeldCache
from tests.waiting import wait_for
from trainer.data.formats import count_lines
from trainer.data.samples import hash_files
from trainer.data.sources import find_data
from trainer.system.process.child import PROGRESS_VARIABLE
from trainer.system.storage import progress
from trainer.system.storage.atomic_folder import make_record
from trainer.system.storage.cache_folder import ensure_entry
from trainer.system.storage.progress import Progress, latest_progress, report_progress


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


def test_bytes_are_shown_in_mib() -> None:
    counted = Progress("hashing a", 3 << 20, lambda _line: None, Clock(), unit="bytes")
    counted.advance(3 << 19)
    assert counted.line == "hashing a: 1.5 of 3.0 MiB, 0 s left"
    assert counted.amount == "hashing a: 1.5 of 3.0 MiB"


def test_the_count_of_a_process_only_grows_and_its_amount_has_no_time() -> None:
    before, _ = latest_progress()
    with report_progress("reading a", 10) as counted:
        counted.advance(4)
        assert latest_progress() == (before + 4, "reading a: 4 of 10 rows")
    with report_progress("hashing b", unit="bytes") as counted:
        assert latest_progress() == (before + 4, "hashing b: 0.0 MiB")
        counted.advance(1 << 20)
    assert latest_progress() == (before + 4 + (1 << 20), "hashing b: 1.0 MiB")


def test_hashing_counting_and_pipes_count(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "a"}\n' * 1000)
    size = file.stat().st_size
    for read, line in (
        (lambda: hash_files([file]), "hashing data.jsonl: 0.0 of 0.0 MiB"),
        (lambda: make_record(file), "hashing data.jsonl: 0.0 of 0.0 MiB"),
        (lambda: count_lines(file), "counting the lines of data.jsonl: 0.0 of 0.0 MiB"),
    ):
        before, _ = latest_progress()
        read()
        assert latest_progress() == (before + size, line)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    before, _ = latest_progress()
    writer = threading.Thread(target=lambda: pipe.write_bytes(b"x" * 1000))
    writer.start()
    find_data(pipe)
    writer.join()
    assert latest_progress() == (before + 1000, f"reading the pipe {pipe}: 0.0 MiB")


def test_what_another_process_writes_of_an_entry_counts_for_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    digest = "0123456789abcdef"
    with HeldCache(tmp_path / "cache", grows=True):
        before, _ = latest_progress()
        waiting = threading.Thread(
            target=ensure_entry, args=("a", digest, lambda: {"file": [b"x"]})
        )
        waiting.start()
        wait_for(lambda: latest_progress()[0] > before + (2 << 20), "two MiB of the other process")
        assert latest_progress()[1].startswith("waiting for another process that fills ")
    waiting.join()
    assert (ensure_entry("a", digest, dict) / "file").read_bytes() == b"x"


def test_the_file_of_a_supervisor_holds_the_line_until_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress"
    monkeypatch.setenv(PROGRESS_VARIABLE, str(path))
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)
    with report_progress("reading a", 3000) as counted:
        counted.advance(1000)
        assert path.read_text().startswith("reading a: 1,000 of 3,000 rows, ")
        counted.advance(2000)
        assert path.read_text() == "reading a: 3,000 of 3,000 rows, 0 s left"
    assert not path.exists()
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "gone" / "progress"))
    with report_progress("reading a") as counted:  # what cannot be written does not end the reading
        counted.advance(1000)
