"""Views that go on: follow a run to its end, or watch it. Ctrl-C leaves the run alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from launcher import render
from launcher.bringup import job_failure
from launcher.observation import Cockpit, RunView
from launcher.runs import Run
from launcher.supervisor import POLL
from launcher.teardown import tear_down

_PROGRESS_EVERY = 2.0


def follow_run(run: Run, report: Callable[[str], None]) -> RunView:
    """Report progress until the run is over, and return how it ended, nothing left running.

    Raises:
        JobFailedError: it failed, or was stopped before it had finished.
    """
    cockpit = Cockpit(run)
    said, said_at = "", 0.0
    with render.detaching("launch cluster status --watch", run.run_id):
        while (view := cockpit.observe()).state not in ("finished", "failed", "stopped"):
            line = render.headline(view)
            if line != said and time.monotonic() - said_at >= _PROGRESS_EVERY:
                report(line)
                said, said_at = line, time.monotonic()
            time.sleep(4 * POLL)
    if view.state != "finished":
        failure = job_failure(cockpit, view)
        tear_down(run)
        raise failure
    deadline = time.monotonic() + 10.0  # the workers are told that it is over, and leave
    while cockpit.observe().is_live and time.monotonic() < deadline:
        time.sleep(POLL)
    tear_down(run)
    return cockpit.observe()


def watch_run(run: Run, as_json: bool) -> None:
    """Show a run every second until it is over or Ctrl-C.

    A live table on a terminal, else a line a change; JSON is one object a look.
    """
    from rich.console import Group
    from rich.live import Live

    cockpit = Cockpit(run)
    with render.detaching("launch cluster status --watch", run.run_id):
        if as_json:
            while (view := cockpit.observe()).is_live:
                render.print_json(render.status_tree(view))
                time.sleep(1.0)
            render.print_json(render.status_tree(view))
            return
        if not sys.stdout.isatty():
            _print_changes(cockpit)
            return
        with Live(console=render.console(), auto_refresh=False) as live:
            while True:
                view = cockpit.observe()
                live.update(Group(render.headline(view), render.status_table(view)), refresh=True)
                if not view.is_live:
                    return
                time.sleep(1.0)


def _print_changes(cockpit: Cockpit) -> None:
    said = ""
    while True:
        view = cockpit.observe()
        if (line := render.headline(view)) != said:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            said = line
        if not view.is_live:
            return
        time.sleep(1.0)
