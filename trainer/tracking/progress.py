"""A run's progress: a live view on a terminal, plain lines elsewhere.

Both show only the dictionaries of status.json and metrics.jsonl. A view that fails (a closed pipe,
an unusual terminal) is dropped; training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

logger = logging.getLogger(__name__)

Status = Mapping[str, Any]
_STATE_STYLE = {"active": "green", "joining": "cyan", "idle": "yellow", "lost": "red"}


class ProgressView(Protocol):
    """Shows one run."""

    def update(self, status: Status) -> None:
        """Show the run's status (`trainer.tracking.status.Status`)."""
        ...

    def event(self, event: str, step: int, **details: Any) -> None:
        """Show an event, as `MetricsLog.event` records it."""
        ...

    def close(self) -> None:
        """Leave the last state on the screen."""
        ...


def open_view(stream: TextIO | None = None) -> ProgressView:
    """Return the view for a stream (stderr): live on a terminal, else lines."""
    return choose_view(LiveView, PlainView, stream)


def choose_view(
    live: Callable[[TextIO], ProgressView],
    plain: Callable[[TextIO], ProgressView],
    stream: TextIO | None = None,
) -> ProgressView:
    """Return one of two views, guarded: the live one when the stream (stderr) is a terminal."""
    stream = stream or sys.stderr
    if stream is None:  # a detached process may have none
        return GuardedView(None)
    is_live = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return GuardedView(live(stream) if is_live else plain(stream))


def show_lines(lines: Iterable[str]) -> None:
    """Print lines below a closed view, unwrapped: their commands are to be copied."""
    if sys.stderr is not None:  # a detached process may have none
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()


class GuardedView:
    """Forwards everything until the view first fails."""

    def __init__(self, view: ProgressView | None) -> None:
        self._view = view

    def update(self, status: Status) -> None:
        """See ProgressView."""
        self._try(lambda view: view.update(status))

    def event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._try(lambda view: view.event(event, step, **details))

    def close(self) -> None:
        """See ProgressView."""
        self._try(lambda view: view.close())
        self._view = None

    def _try(self, action: Callable[[ProgressView], None]) -> None:
        if self._view is None:
            return
        try:
            action(self._view)
        except Exception as error:  # a view's failure never ends a run
            view, self._view = self._view, None
            logger.warning("progress is no longer shown: %s", error or type(error).__name__)
            with contextlib.suppress(Exception):
                view.close()


class StepTimes:
    """Seconds a step over the last steps, for the remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque(maxlen=50)

    def seen(self, step: int) -> None:
        """Note that `step` updates are applied."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # a resumed run is at an earlier step
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((self._clock(), step))

    def left(self, total_steps: int) -> float | None:
        """Return the seconds left, None while unknown."""
        if len(self._seen) < 2:
            return None
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        return (total_steps - last) * (end - begin) / (last - first)


class PlainView:
    """One line for a step, or for `interval` seconds when steps are quicker; events at once."""

    def __init__(
        self, stream: TextIO, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._interval = interval
        self._clock = clock
        self._pace = StepTimes(clock)
        self._shown: tuple[float, int, str] | None = None
        self._validated: Mapping[str, Any] | None = None

    def update(self, status: Status) -> None:
        """See ProgressView."""
        step, state = status["step"], status["state"]
        if state == "running":  # waiting for workers is not part of the pace
            self._pace.seen(step)
        now = self._clock()
        validation = status.get("validation")
        if validation and validation != self._validated:
            self._validated = validation
            self._print(f"step {validation['step']}: {_validation(validation)}")
        if self._shown:
            shown_at, shown_step, shown_state = self._shown
            last = step >= status["total_steps"] and step != shown_step
            due = step != shown_step and now - shown_at >= self._interval
            if state == shown_state and not due and not last:
                return
        self._shown = (now, step, state)
        self._print(_summary(status, self._pace.left(status["total_steps"])))

    def event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._print(_event(event, step, details))

    def close(self) -> None:
        """See ProgressView."""

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class ViewConsole(Console):
    """A console that raises on a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise instead of ending the process."""
        self.quiet = True
        raise BrokenPipeError("the terminal was closed")


class LiveView:
    """A redrawn panel: progress, figures, a row for each worker, the last events."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = ViewConsole(file=stream)  # honours NO_COLOR by itself
        self._pace = StepTimes(clock)
        self._status: Status | None = None
        self._events: deque[str] = deque(maxlen=5)
        # Drawn on update only: a thread could fail unnoticed.
        # Log lines on stderr are drawn above it; stdout is data.
        self._live = Live(
            console=self.console, auto_refresh=False, transient=False, redirect_stdout=False
        )
        self._live.start()
        self._clock = clock
        self._drawn_at = -float("inf")

    def update(self, status: Status) -> None:
        """See ProgressView."""
        changed = self._status is None or status["state"] != self._status["state"]
        self._status = status
        if status["state"] == "running":
            self._pace.seen(status["step"])
        if changed or self._clock() - self._drawn_at >= 0.2:
            self._draw()

    def event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._events.append(_event(event, step, details))
        self._draw()

    def close(self) -> None:
        """See ProgressView."""
        self._draw()
        self._live.stop()

    def _draw(self) -> None:
        self._drawn_at = self._clock()
        self._live.update(Group(*self._parts()), refresh=True)

    def _parts(self) -> list[Any]:
        events = [Text(event, style="dim") for event in self._events]
        status = self._status
        if status is None:
            return events
        total = status["total_steps"]
        # In a grid, because a bare bar ends without a line break.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(total, 1), completed=status["step"], width=60))
        parts: list[Any] = [
            Text(_summary(status, self._pace.left(total)), style="bold"),
            bar,
        ]
        if status.get("validation"):
            parts.append(Text(_validation(status["validation"])))
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("rank", "device", "backend", "share", "tok/s", "state"):
            table.add_column(name, justify="right" if name in ("share", "tok/s") else "left")
        for worker in status["workers"]:
            table.add_row(
                str(worker["rank"]),
                Text(f"{worker['host']} {worker['device']}"),
                str(worker["backend"]),
                str(worker["samples"]),
                _number(worker["tokens_per_second"]),
                Text(worker["state"], style=_STATE_STYLE.get(worker["state"], "")),
            )
        return [*parts, table, *events]


def _summary(status: Status, left: float | None) -> str:
    """Return the figures of a status in one line."""
    state = status["state"]
    active = sum(worker["state"] == "active" for worker in status["workers"])
    parts = [f"step {status['step']}/{status['total_steps']}"]
    if status["step"]:
        parts.append(f"loss {loss_text(status['loss'])}")
    if status["learning_rate"] is not None:
        parts.append(f"lr {status['learning_rate']:.2e}")
    if status["tokens_per_second"] is not None:
        parts.append(f"{_number(status['tokens_per_second'])} tok/s")
    parts.append(f"{active}/{status['expect_workers']} workers")
    if left is not None and state == "running":
        parts.append(f"{duration(left)} left")
    if state != "running":
        reason = status.get("reason") or ""
        parts.append(reason if reason.startswith(state) else f"{state}: {reason}".rstrip(": "))
    return "  ".join(parts)


def loss_text(loss: float | None) -> str:
    """Return a loss to read; `-` of a step in which no token was learned."""
    return "-" if loss is None else f"{loss:.4f}"


def figures(validation: Mapping[str, Any]) -> list[str]:
    """Return a validation's figures, each with its name."""
    parts = [f"validation loss {validation['loss']:.4f}"]
    if validation.get("accuracy") is not None:
        parts.append(f"accuracy {validation['accuracy']:.3f}")
    if validation.get("mcc") is not None:
        parts.append(f"MCC {validation['mcc']:.3f}")
    return parts


def _validation(validation: Mapping[str, Any]) -> str:
    return "  ".join(figures(validation))


def _event(event: str, step: int, details: Mapping[str, Any]) -> str:
    rest = dict(details)
    rank = rest.pop("rank", None)
    reason = rest.pop("reason", None)
    who = f" rank {rank}" if rank is not None else ""
    more = "".join(f" {key}={value}" for key, value in rest.items())
    return f"step {step}:{who} {event}{more}" + (f": {reason}" if reason else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return 95 seconds as `1:35`, 3700 as `1:01:40`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
