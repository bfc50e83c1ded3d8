"""Continuous views: follow a run to its end, or watch it. Ctrl-C leaves the run alone."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable

from launcher.runs.down import tear_down
from launcher.runs.failures import Failure, FailureWatch
from launcher.runs.join import job_failure
from launcher.runs.processes.session import POLL
from launcher.runs.records.run import Run
from launcher.runs.status import OVER, RunMonitor, RunView
from launcher.terminal import redraw_line
from launcher.views import render
from launcher.views.live_view import EventFeed, live_view
from launcher.views.telemetry import LOOK_EVERY, Telemetry

_PROGRESS_EVERY = 2.0
_REDRAW = 0.5
_OTHER_LINES = 12
"""Lines of the live view with its events; the rest of a terminal's height is the loss curve."""
WATCH = "launch status --watch"
"""Command that shows a run again."""


def follow_run(run: Run, report: Callable[[str], None]) -> RunView:
    """Report progress until the run is over, and return how it ended, nothing left running.

    Raises:
        JobFailedError: it failed, or was stopped before it had finished.
    """
    monitor = RunMonitor(run)
    watch = FailureWatch(monitor)
    last_line, reported_at = "", 0.0
    with redraw_line(report) as report_progress:
        while (view := monitor.observe()).state not in OVER:
            for failure in watch.new_failures(view):
                for text in failure.lines:
                    report(text)
            line = render.run_headline(view)
            if line != last_line and time.monotonic() - reported_at >= _PROGRESS_EVERY:
                report_progress(line)
                last_line, reported_at = line, time.monotonic()
            time.sleep(4 * POLL)
    if view.state != "completed":
        failure = job_failure(monitor, view)
        tear_down(run)
        raise failure
    deadline = time.monotonic() + 10.0  # the others learn that it is over, and end
    while monitor.observe().is_live and time.monotonic() < deadline:
        time.sleep(POLL)
    tear_down(run)
    return monitor.observe()


def watch_run(run: Run, as_json: bool) -> None:
    """Show a run until it is over or Ctrl-C; an unreachable host delays nothing.

    A live picture on a terminal, else a line a change; JSON is one object a look.
    """
    with render.detach_on_interrupt(WATCH, run.run_id):
        if as_json:
            monitor = RunMonitor(run)
            while not is_over(view := monitor.observe()):
                render.print_json(render.status_tree(view))
                time.sleep(LOOK_EVERY)
            render.print_json(render.status_tree(view))
        elif draws_pictures():
            _draw_until_end(run)
        else:
            with contextlib.closing(Telemetry(RunMonitor(run))) as telemetry:
                _print_changes(telemetry)


def draws_pictures() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_over(view: RunView) -> bool:
    """Whether a run is over; False while its leader's host is unreachable."""
    return not view.is_live and view.state != "unknown"


def _draw_until_end(run: Run) -> None:
    from rich.live import Live

    console, events = render.make_console(), EventFeed()
    rows = min(6, max(1, console.height - len(run.plan.processes) - _OTHER_LINES))
    with (
        contextlib.closing(Telemetry(RunMonitor(run))) as telemetry,
        Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        telemetry.start()
        while True:
            snapshot = telemetry.get_snapshot()
            seen = events.update(snapshot.view)
            live.update(live_view(snapshot, console.width, seen, rows), refresh=True)
            if is_over(snapshot.view):
                return
            time.sleep(_REDRAW)


def _print_changes(telemetry: Telemetry) -> None:
    printed: dict[str, str] = {}
    shown: tuple[Failure, ...] = ()
    telemetry.start()
    while True:
        snapshot = telemetry.get_snapshot()
        view = snapshot.view
        lines = {"run": render.run_headline(view)}
        for process in view.run.plan.processes:
            state = view.processes[process.name]
            attempt = f", attempt {state.attempt}" if state.attempt > 1 else ""
            lines[process.name] = f"{process.name} on {process.host}: {state.state}{attempt}"
        for key, line in lines.items():
            if printed.get(key) != line:
                render.print_line(line)
        printed = lines
        for failure in snapshot.failures:
            if failure not in shown:
                for line in failure.lines:
                    render.print_line(line)
        shown = snapshot.failures
        if is_over(view):
            return
        time.sleep(LOOK_EVERY)
