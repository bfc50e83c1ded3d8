"""End a run, and prove that nothing of it is left."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator
from dataclasses import dataclass

from launcher import processes
from launcher.errors import PartialError
from launcher.observation import Cockpit
from launcher.runs import Run

GRACE = 20.0
"""Seconds for a process to end by itself: the keeper's own grace (15 s) and some."""
_SETTLE = 1.0
"""Seconds for what is already on its way out, such as a keeper that wrote its last state."""
_SWEEP_DEADLINE = 10.0


@dataclass(frozen=True)
class Ending:
    """What `tear_down` did."""

    run_id: str
    stopped: tuple[str, ...]
    """Processes that were kept running and now are not."""
    stragglers: tuple[str, ...]
    """What was found besides, and killed."""


def tear_down(run: Run, grace: float = GRACE) -> Ending:
    """Stop everything of a run; does nothing when nothing runs.

    The coordinator goes first: it finishes its step with the workers, saves, and sends them home.

    Raises:
        PartialError: something is left that cannot be ended.
    """
    run.mark_going_down()
    cockpit = Cockpit(run)
    living = [p for p in run.plan.processes if not cockpit.state(p).is_over]
    for group in (run.plan.processes[:1], run.plan.processes[1:]):
        for host in {process.host for process in group}:
            here = [process for process in group if process.host == host]
            cockpit.supervisor(here[0]).stop(here, grace)
    return Ending(run.run_id, tuple(p.name for p in living), tuple(_sweep(cockpit)))


@contextlib.contextmanager
def uninterrupted() -> Generator[None]:
    """Put off signals that would end the launcher in the middle of cleaning up."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _sweep(cockpit: Cockpit) -> list[str]:
    """Kill whoever still carries the run's id, until nobody does."""
    found: dict[processes.ProcessIdentity, str] = {}
    patient_until = time.monotonic() + _SETTLE
    until = patient_until + _SWEEP_DEADLINE
    while True:
        left = [
            (connection, process)
            for connection in cockpit.connections.values()
            for process in connection.find_run(cockpit.run.run_id)
        ]
        if not left:
            return list(found.values())
        if time.monotonic() > until:
            names = ", ".join(processes.describe(process) for _, process in left)
            raise PartialError(f"run {cockpit.run.run_id}: cannot be ended: {names}")
        for connection, process in left if time.monotonic() > patient_until else ():
            found.setdefault(process, processes.describe(process))
            connection.send_signal(process, signal.SIGKILL)
        time.sleep(0.05)
