"""Moments as text, and back."""

from __future__ import annotations

import logging
import time

import pytest

from trainer.system.commandline.wrapping import LogFormatter
from trainer.system.timestamp import format_timestamp, leading_timestamp


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "NPT-5:45")  # Nepal, 5:45 hours ahead of UTC
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_a_moment_is_the_same_text_in_every_time_zone() -> None:
    assert format_timestamp(1_795_000_000.9) == "2026-11-18T11:06:40Z"
    assert leading_timestamp(format_timestamp(1_795_000_000) + " step 3") == 1_795_000_000


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 2026-11-18T11:06:40Z",
        "11:06:40 step",
        "2026-13-18T11:06:40Z step",
        "2026-11-18T11:06:40Zone",
        "2026-11-18T11:06:40+00:00",
    ],
)
def test_other_lines_have_none(line: str) -> None:
    assert leading_timestamp(line) is None


def test_lines_of_a_log_begin_with_it() -> None:
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "joined", None, None)
    record.created = 1_795_000_000.5
    assert LogFormatter(None).format(record) == "2026-11-18T11:06:40Z joined"
