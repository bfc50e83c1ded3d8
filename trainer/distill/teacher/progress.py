"""A teacher's progress: its counts and its view."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer.distill.logits.description import ShardPlan
from trainer.tracking.progress import ProgressView, StepTimes, ViewConsole, choose_view, stamp_line
from trainer.tracking.progress_picture import format_duration


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The finished part of a teacher's share, earlier shards included."""

    shards_done: int
    shards: int
    tokens_done: int
    tokens: int
    tokens_per_second: float | None
    seconds_left: float | None

    def __str__(self) -> str:
        parts = [
            f"shard {self.shards_done}/{self.shards}",
            f"{self.tokens_done:,}/{self.tokens:,} tokens",
        ]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return "  ".join(parts)


class Counters:
    """Counts the tokens of a teacher's share."""

    def __init__(
        self, share: Sequence[ShardPlan], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share = share
        self._done: set[int] = set()
        self._reading = 0  # tokens of shards that are not on disk yet
        self._read = 0
        self._pace = StepTimes(clock)

    def start_clock(self) -> None:
        """Start the clock: the model is loaded."""
        self._pace.observe_step(self._read)

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that were scored."""
        self._reading += tokens
        self._read += tokens
        self._pace.observe_step(self._read)

    def count_written(self, plan: ShardPlan) -> None:
        """Count a shard that was scored and is on disk."""
        self._done.add(plan.number)
        self._reading -= plan.tokens

    def count_found(self, plan: ShardPlan) -> None:
        """Count a shard that was on disk before."""
        self._done.add(plan.number)

    def uncount_lost(self, plan: ShardPlan) -> None:
        """Uncount a shard that has to be scored again."""
        self._done.discard(plan.number)

    @property
    def progress(self) -> Progress:
        """The totals of the counts."""
        tokens = sum(plan.tokens for plan in self._share)
        done = sum(plan.tokens for plan in self._share if plan.number in self._done)
        done += self._reading
        seconds = self._pace.estimate_seconds_left(self._read + 1)  # for one token
        return Progress(
            shards_done=len(self._done),
            shards=len(self._share),
            tokens_done=done,
            tokens=tokens,
            tokens_per_second=None if seconds is None else 1 / seconds,
            seconds_left=self._pace.estimate_seconds_left(self._read + tokens - done),
        )


def open_teacher_view(stream: TextIO | None = None) -> ProgressView:
    """Return the view that fits a stream (stderr); a status is `Progress` as a mapping."""
    return choose_view(LiveTeacher, PlainTeacher, stream)


class PlainTeacher:
    """A ProgressView of lines, at least `interval` seconds apart."""

    def __init__(
        self, stream: TextIO, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._interval, self._clock = stream, interval, clock
        self._shown_at = -float("inf")

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Print a line when the last one is old enough, or all is done."""
        progress = Progress(**status)
        is_last = progress.shards_done == progress.shards
        if is_last or self._clock() - self._shown_at >= self._interval:
            self._shown_at = self._clock()
            print(stamp_line(str(progress)), file=self._stream, flush=True)

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView; a teacher logs what happens."""

    def close(self) -> None:
        """See ProgressView."""


class LiveTeacher:
    """A ProgressView that redraws a bar."""

    def __init__(self, stream: TextIO) -> None:
        self._live = Live(
            console=ViewConsole(file=stream), auto_refresh=False, redirect_stdout=False
        )
        self._live.start()

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Redraw."""
        progress = Progress(**status)
        bar = Table.grid()  # a bare bar ends without a line break
        bar.add_row(ProgressBar(max(progress.tokens, 1), progress.tokens_done, width=60))
        self._live.update(Group(Text(str(progress), style="bold"), bar), refresh=True)

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView; a teacher logs what happens."""

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.stop()
