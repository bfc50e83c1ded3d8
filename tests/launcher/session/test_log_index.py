"""When a log grew, from its marks."""

from pathlib import Path

import pytest

from launcher.session.log_index import LogMarks, find_offset

MARKS = b"100.0 0\n105.0 50\n130.0 80\n"


@pytest.mark.parametrize(
    ("moment", "offset"),
    [(1.0, 0), (100.0, 0), (104.9, 0), (105.0, 50), (129.9, 50), (130.0, 80), (9e9, 80)],
)
def test_where_the_log_was(moment: float, offset: int) -> None:
    assert find_offset(MARKS, moment) == offset


def test_a_clock_that_was_set_back_loses_no_lines() -> None:
    assert find_offset(b"100.0 10\n90.0 20\n120.0 30\n", 95.0) == 0
    assert find_offset(b"100.0 10\n90.0 20\n120.0 30\n", 110.0) == 20


def test_torn_marks_are_left_out() -> None:
    assert find_offset(b"100.0 10\n10", 200.0) == 10
    assert find_offset(b"", 200.0) is None
    assert find_offset(b"\n\nx y\n", 200.0) is None


def test_a_mark_is_taken_when_the_log_grew(tmp_path: Path) -> None:
    log = tmp_path / "attempt-3.log"
    marks = LogMarks(log)
    marks.take_mark()
    log.write_bytes(b"12345")
    marks.take_mark(unless_younger_than=3600.0)  # not yet
    marks.take_mark(unless_younger_than=1e-9)
    marks.take_mark(unless_younger_than=1e-9)  # it has not grown
    marks.take_mark()  # the end counts in any case
    lines = (tmp_path / "attempt-3.times").read_text().splitlines()
    assert [line.split()[1] for line in lines] == ["0", "5", "5"]


def test_a_full_disk_does_not_matter(tmp_path: Path) -> None:
    LogMarks(tmp_path / "nowhere" / "attempt-1.log").take_mark()
