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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer.system.commandline.wrapping import terminal_width, wrap_card
from trainer.system.timestamp import format_timestamp
from trainer.tracking.progress_picture import (
    format_duration,
    format_rate,
    loss_text,
    progress_picture,
    share_text,
)

logger = logging.getLogger(__name__)

Status = Mapping[str, Any]
_STATE_STYLE = {"active": "green", "joining": "cyan", "idle": "yellow", "lost": "red"}


class ProgressView(Protocol):
    """Shows one run."""

    def show_status(self, status: Status) -> None:
        """Show the run's status (`trainer.tracking.status.Status`)."""
        ...

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """Show an event, as `MetricsLog.record_event` records it."""
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
    """Print a card below a closed view; in a log its lines have their time, as all do."""
    if sys.stderr is not None:  # a detached process may have none
        with contextlib.suppress(OSError, ValueError):
            width = terminal_width(sys.stderr)
            shown = wrap_card(lines, width) if width else map(stamp_line, lines)
            sys.stderr.write("".join(f"{line}\n" for line in shown))
            sys.stderr.flush()


def stamp_line(line: str) -> str:
    """Return a line as a log has it, with the time."""
    return f"{format_timestamp()} {line}"


class GuardedView:
    """Forwards everything until the view first fails."""

    def __init__(self, view: ProgressView | None) -> None:
        self._view = view

    def show_status(self, status: Status) -> None:
        """See ProgressView."""
        self._try_action(lambda view: view.show_status(status))

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._try_action(lambda view: view.show_event(event, step, **details))

    def close(self) -> None:
        """See ProgressView."""
        self._try_action(lambda view: view.close())
        self._view = None

    def _try_action(self, action: Callable[[ProgressView], None]) -> None:
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

    def observe_step(self, step: int) -> None:
        """Note that `step` updates are applied."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # a resumed run is at an earlier step
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((self._clock(), step))

    def estimate_seconds_left(self, total_steps: int) -> float | None:
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

    def show_status(self, status: Status) -> None:
        """See ProgressView."""
        step, state = status["step"], status["state"]
        if state == "running":  # waiting for workers is not part of the pace
            self._pace.observe_step(step)
        now = self._clock()
        validation = status.get("validation")
        if validation and validation != self._validated:
            self._validated = validation
            self._print_line(f"step {validation['step']}: {_format_validation(validation)}")
        if self._shown:
            shown_at, shown_step, shown_state = self._shown
            last = step >= status["total_steps"] and step != shown_step
            due = step != shown_step and now - shown_at >= self._interval
            if state == shown_state and not due and not last:
                return
        self._shown = (now, step, state)
        self._print_line(
            _summarize_status(status, self._pace.estimate_seconds_left(status["total_steps"]))
        )

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._print_line(_format_event(event, step, details))

    def close(self) -> None:
        """See ProgressView."""

    def _print_line(self, line: str) -> None:
        print(stamp_line(line), file=self._stream, flush=True)


class ViewConsole(Console):
    """A console that raises on a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise instead of ending the process."""
        self.quiet = True
        raise BrokenPipeError("the terminal was closed")


class LiveView:
    """A redrawn panel as `launch status --watch` has it, with the last events."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = ViewConsole(file=stream)  # honours NO_COLOR by itself
        self._pace = StepTimes(clock)
        self._status: Status | None = None
        self._events: deque[str] = deque(maxlen=5)
        self._losses: deque[float] = deque(maxlen=600)
        self._began = clock()
        # Drawn on update only: a thread could fail unnoticed.
        # Log lines on stderr are drawn above it; stdout is data.
        self._live = Live(
            console=self.console, auto_refresh=False, transient=False, redirect_stdout=False
        )
        self._live.start()
        self._clock = clock
        self._drawn_at = -float("inf")

    def show_status(self, status: Status) -> None:
        """See ProgressView."""
        last = self._status
        changed = last is None or status["state"] != last["state"]
        if status["loss"] is not None and (last is None or status["step"] != last["step"]):
            self._losses.append(status["loss"])
        self._status = dict(status)
        if status["state"] == "running":
            self._pace.observe_step(status["step"])
        if changed or self._clock() - self._drawn_at >= 0.2:
            self._draw_panel()

    def show_event(self, event: str, step: int, **details: Any) -> None:
        """See ProgressView."""
        self._events.append(stamp_line(_format_event(event, step, details)))
        self._draw_panel()

    def close(self) -> None:
        """See ProgressView."""
        self._draw_panel()
        self._live.stop()

    def _draw_panel(self) -> None:
        self._drawn_at = self._clock()
        self._live.update(Group(*self._panel_parts()), refresh=True)

    def _panel_parts(self) -> list[Any]:
        events = [Text(event, style="dim") for event in self._events]
        status = self._status
        if status is None:
            return events
        width = self.console.width
        left = (
            self._pace.estimate_seconds_left(status["total_steps"])
            if status["state"] == "running"
            else None
        )
        parts: list[Any] = [
            self._format_title(status),
            *progress_picture(status, tuple(self._losses), left, width),
            Text(""),
            _worker_table(status["workers"], status["unit"]),
        ]
        return [*parts, *([Text("")] if events else []), *events]

    def _format_title(self, status: Status) -> Text:
        title = Text.assemble(
            (status["run_id"], "bold"),
            "  ",
            (_describe_outcome(status), _STATE_STYLE.get(status["state"], "")),
        )
        present = sum(worker["state"] != "lost" for worker in status["workers"])
        if present < status["expect_workers"]:
            title.append(f"  {present} of {status['expect_workers']} workers", "yellow")
        title.append(f"  {format_duration(self._clock() - self._began)}", "dim")
        return title


def _worker_table(workers: Sequence[Mapping[str, Any]], unit: str) -> Table:
    """Return a row for each worker, in the columns and units of `launch status`."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("NAME", "HOST", "DEVICE", "STATE", "BATCH", f"{unit.upper()}/S"):
        right = name == "BATCH" or name.endswith("/S")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    shares = [0 if w["state"] in ("idle", "lost") else w["samples"] for w in workers]
    for worker, share in zip(workers, shares, strict=True):
        table.add_row(
            f"worker-{worker['rank']}",
            Text(worker["host"]),
            Text(worker["device"]),
            Text(worker["state"], style=_STATE_STYLE.get(worker["state"], "")),
            share_text(share, sum(shares)),
            _format_number(worker["tokens_per_second"]),
        )
    return table


def _describe_outcome(status: Status) -> str:
    """Return a run's state, with the reason unless that only repeats it."""
    state, reason = status["state"], status.get("reason") or ""
    if state == "completed" or not reason:
        return str(state)
    return reason if reason.startswith(state) else f"{state}: {reason}"


def _summarize_status(status: Status, left: float | None) -> str:
    """Return the figures of a status in one line."""
    state = status["state"]
    active = sum(worker["state"] == "active" for worker in status["workers"])
    parts = [f"step {status['step']}/{status['total_steps']}"]
    if status["step"]:
        parts.append(loss_text(status))
    if status["learning_rate"] is not None:
        parts.append(f"lr {status['learning_rate']:.2e}")
    if status["tokens_per_second"] is not None:
        parts.append(format_rate(status))
    parts.append(f"{active}/{status['expect_workers']} workers")
    if left is not None and state == "running":
        parts.append(f"{format_duration(left)} left")
    if state != "running":
        parts.append(_describe_outcome(status))
    return "  ".join(parts)


def format_figures(validation: Mapping[str, Any]) -> list[str]:
    """Return a validation's figures, each with its name."""
    parts = [f"validation loss {validation['loss']:.4f}"]
    if validation.get("accuracy") is not None:
        parts.append(f"accuracy {validation['accuracy']:.3f}")
    if validation.get("mcc") is not None:
        parts.append(f"MCC {validation['mcc']:.3f}")
    if validation.get("reward_margin") is not None:
        parts.append(f"reward margin {validation['reward_margin']:.3f}")
        parts.append(f"reward accuracy {validation['reward_accuracy']:.1%}")
    return parts + [f"{name} {value:.4g}" for name, value in validation.get("figures", {}).items()]


def _format_validation(validation: Mapping[str, Any]) -> str:
    return "  ".join(format_figures(validation))


def _format_event(event: str, step: int, details: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in details.items() if value not in (None, "")}
    rank = rest.pop("rank", None)
    reason = rest.pop("reason", None)
    who = f" rank {rank}" if rank is not None else ""
    if event in ("joined", "rejoined"):
        return f"step {step}:{who} {event}: {rest.get('device')} on {rest.get('host')}"
    more = "".join(f" {key}={value}" for key, value in rest.items())
    return f"step {step}:{who} {event}{more}" + (f": {reason}" if reason else "")


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
