"""What people see of a teacher: a line now and then, or a bar that is redrawn."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

from tests.trainer.clock import Clock
from trainer.distill.logits.description import ShardPlan
from trainer.distill.teacher.progress import Counters, LiveTeacher, PlainTeacher, open_teacher_view

SHARE = [
    ShardPlan(number=number, first_document=number, stop_document=number + 1, windows=2, tokens=100)
    for number in (1, 3, 5, 7)
]


def test_what_was_there_counts_as_done_and_not_as_fast() -> None:
    clock = Clock()
    tally = Counters(SHARE, clock)
    tally.count_found(SHARE[0])
    assert (tally.progress.tokens_done, tally.progress.tokens_per_second) == (100, None)
    clock.now = 60  # loading the model is not scoring
    tally.start_clock()
    clock.now = 65
    tally.count_tokens(50)
    progress = tally.progress
    assert (progress.shards_done, progress.shards) == (1, 4)
    assert (progress.tokens_done, progress.tokens) == (150, 400)
    assert progress.tokens_per_second == 10
    assert progress.seconds_left == 25
    assert str(progress) == "shard 1/4  150/400 tokens  10 tokens/s  0:25 left"


def test_tokens_are_counted_once_before_and_after_their_shard_is_written() -> None:
    tally = Counters(SHARE)
    tally.count_tokens(100)
    assert (tally.progress.tokens_done, tally.progress.shards_done) == (100, 0)
    tally.count_written(SHARE[0])
    assert (tally.progress.tokens_done, tally.progress.shards_done) == (100, 1)
    tally.uncount_lost(SHARE[0])
    assert (tally.progress.tokens_done, tally.progress.shards_done) == (0, 0)
    for plan in SHARE:
        tally.count_found(plan)
    assert tally.progress.shards_done == tally.progress.shards
    assert tally.progress.tokens_done == 400


def status(tokens: int, shards: int) -> dict[str, Any]:
    tally = Counters(SHARE)
    for plan in SHARE[:shards]:
        tally.count_found(plan)
    tally.count_tokens(tokens)
    return asdict(tally.progress)


def test_lines_come_at_their_interval_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainTeacher(stream, interval=5, clock=clock)
    for now in range(0, 12, 2):
        clock.now = now
        view.show_status(status(now, 0))
    view.show_status(status(0, 4))
    assert [line.partition(" ")[2] for line in stream.getvalue().splitlines()] == [
        "shard 0/4  0/400 tokens",
        "shard 0/4  6/400 tokens",
        "shard 4/4  400/400 tokens",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: Any) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    view = LiveTeacher(terminal)
    view.show_status(status(40, 1))
    view.close()
    assert "shard 1/4  140/400 tokens" in terminal.getvalue()
    assert "━" in terminal.getvalue()


def test_a_stream_that_is_gone_ends_nothing() -> None:
    stream = io.StringIO()
    view = open_teacher_view(stream)
    view.show_status(status(1, 0))
    stream.close()
    view.show_status(status(400, 4))  # the last line is always due
    view.close()
