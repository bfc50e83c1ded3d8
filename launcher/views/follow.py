"""Continuous views: follow a run to its end, or watch it. Ctrl-C leaves the run alone."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Generator

from launcher.runs.down import tear_down
from launcher.runs.failures import Failure, FailureWatch
from launcher.runs.join import job_failure
from launcher.runs.processes.session import POLL
from launcher.runs.records.run import Run
from launcher.runs.status import OVER, RunMonitor, RunView
from launcher.views import render
from launcher.views.events import EventFeed
from launcher.views.live import Look, live_view
from launcher.views.live_log import LiveLog
from launcher.views.telemetry import LOOK_EVERY, Telemetry

_PROGRESS_EVERY = 2.0
_REDRAW = 0.5
_OTHER_LINES = 24
"""Of the live view, with its events and a log: what is left of a terminal's height is a curve."""
_ARROWS = {b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down"}
WATCH = "launch cluster status --watch"
"""What shows a run again."""


def follow_run(run: Run, report: Callable[[str], None]) -> RunView:
    """Report progress until the run is over, and return how it ended, nothing left running.

    Raises:
        JobFailedError: it failed, or was stopped before it had finished.
    """
    monitor = RunMonitor(run)
    watch = FailureWatch(monitor)
    said, said_at = "", 0.0
    while (view := monitor.observe()).state not in OVER:
        for failure in watch.news(view):
            for text in failure.text:
                report(text)
        line = render.headline(view)
        if line != said and time.monotonic() - said_at >= _PROGRESS_EVERY:
            report(line)
            said, said_at = line, time.monotonic()
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
    """Show a run until it is over, `q` or Ctrl-C; an unreachable host delays nothing.

    A live picture on a terminal, else a line a change; JSON is one object a look.
    """
    with render.detaching(WATCH, run.run_id):
        if as_json:
            monitor = RunMonitor(run)
            while not is_over(view := monitor.observe()):
                render.print_json(render.status_tree(view))
                time.sleep(LOOK_EVERY)
            render.print_json(render.status_tree(view))
        elif draws_pictures():
            _draw(run)
        else:
            with contextlib.closing(Telemetry(RunMonitor(run))) as telemetry:
                _print_changes(telemetry)


def draws_pictures() -> bool:
    """Whether stdout is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_over(view: RunView) -> bool:
    """Whether a run is over; False while its leader's host is unreachable."""
    return not view.is_live and view.state != "unknown"


def _draw(run: Run) -> None:
    from rich.live import Live

    console, events, processes = render.console(), EventFeed(), run.plan.processes
    marked, shows_log, shows_help = -1, False, False
    with (
        contextlib.closing(Telemetry(RunMonitor(run))) as telemetry,
        contextlib.closing(LiveLog(RunMonitor(run))) as log,
    ):
        telemetry.start()
        with (
            _read_keys() as key,
            Live(console=console, auto_refresh=False, vertical_overflow="crop") as live,
        ):
            while True:
                snapshot = telemetry.latest()
                chosen = processes[max(0, marked)] if shows_log or marked >= 0 else None
                look = Look(
                    events=events.seen(snapshot.view),
                    chosen=chosen.name if chosen else "",
                    log=log.show(chosen) if chosen and shows_log else None,
                    help=shows_help,
                    rows=min(6, max(1, console.height - len(processes) - _OTHER_LINES)),
                    footer=key is not _wait,
                )
                live.update(live_view(snapshot, console.width, look), refresh=True)
                if is_over(snapshot.view):
                    break
                match key(_REDRAW):
                    case "q":
                        break
                    case "l":
                        shows_log = not shows_log
                    case "?":
                        shows_help = not shows_help
                    case "down":
                        marked = (marked + 1) % len(processes)
                    case "up":
                        marked = (max(0, marked) - 1) % len(processes)
                    case _:
                        pass
    if not is_over(snapshot.view):
        render.say_detached(WATCH, snapshot.view.run.run_id)


def _print_changes(telemetry: Telemetry) -> None:
    said: dict[str, str] = {}
    shown: tuple[Failure, ...] = ()
    telemetry.start()
    while True:
        snapshot = telemetry.latest()
        view = snapshot.view
        lines = {"run": render.headline(view)}
        for process in view.run.plan.processes:
            state = view.processes[process.name]
            attempt = f", attempt {state.attempt}" if state.attempt > 1 else ""
            lines[process.name] = f"{process.name} on {process.host}: {state.state}{attempt}"
        for key, line in lines.items():
            if said.get(key) != line:
                render.say(line)
        said = lines
        for failure in snapshot.failures:
            if failure not in shown:
                for line in failure.text:
                    render.say(line)
        shown = snapshot.failures
        if is_over(view):
            return
        time.sleep(LOOK_EVERY)


@contextlib.contextmanager
def _read_keys() -> Generator[Callable[[float], str]]:
    """Yield what waits so many seconds for a key, without Enter: `""` for none, `up`, `down`.

    Ctrl-C keeps its meaning. Without a terminal on stdin, or in the background, it only waits.
    """
    import termios
    import tty

    descriptor = -1
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        before = None
    if before is None or _is_behind(descriptor):
        yield _wait
        return

    def key(seconds: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        pressed = os.read(descriptor, 16) if ready else b""
        if ready and not pressed:  # end of file: the terminal was closed
            time.sleep(seconds)
        return _ARROWS.get(pressed[:3], pressed[:1].decode(errors="replace"))

    tty.setcbreak(descriptor, termios.TCSANOW)
    try:
        yield key
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _is_behind(descriptor: int) -> bool:
    """Whether this is a background job, which is stopped when it changes the terminal."""
    try:
        return os.tcgetpgrp(descriptor) != os.getpgrp()
    except OSError:  # not our controlling terminal: job control does not apply
        return False


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""
