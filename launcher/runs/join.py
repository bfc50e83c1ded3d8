"""Wait for a started run until all workers have joined, until its first step, or until it fails.

A missing process is named with its last log lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from launcher.errors import (
    InterruptedStartError,
    JobFailedError,
    LauncherError,
    OverBudgetError,
    PartialError,
)
from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.session import POLL
from launcher.runs.records.run import Run
from launcher.runs.status import OVER, RunMonitor, RunView
from trainer.system.errors import BudgetStopError
from trainer.system.process.heartbeat import HeartbeatMonitor

STEP_PATIENCE = 15.0
"""Seconds for which `up` waits for the first step, to say how long it took."""

LONGEST_PAUSE = 1.0
"""Seconds between two looks in a long wait."""

PROGRESS_INTERVAL = 10.0
"""Seconds between two lines of `up` on the reading of data."""

Report = Callable[[str], None]


def wait_until_joined(run: Run, timeout: float, report: Report) -> None:
    """Wait until every follower takes part and training has begun.

    Args:
        timeout: seconds in which no process reports progress.

    Raises:
        PartialError: processes are missing; names them with their last log lines.
        JobFailedError: the leader failed.
        InterruptedStartError: the run was stopped during the wait.
    """
    monitor = RunMonitor(run)
    silence = HeartbeatMonitor(time.monotonic)
    began, last_line, make_progress = time.monotonic(), "", -math.inf
    while True:
        view = monitor.observe()
        reading = {name: p.progress for name, p in view.processes.items() if p.progress}
        silent = silence.observe(reading or None)
        if view.end is not None:
            raise InterruptedStartError(f"run {run.run_id} was stopped during its start")
        if view.state in ("failed", "stopped"):
            raise job_failure(monitor, view)
        if view.state in ("scoring", "completed") or (
            _is_at_work(view) and not view.missing_processes
        ):
            return
        if (line := _describe_joined(view)) != last_line:
            last_line = line
            report(last_line)
        if reading and time.monotonic() - make_progress >= PROGRESS_INTERVAL:
            make_progress = time.monotonic()
            report(": ".join(next(iter(reading.items()))))
        hopeless = [p for p in view.missing_processes if view.processes[p.name].is_over]
        if hopeless and view.training is not None and view.training.get("state") == "completed":
            hopeless = []
        if hopeless or silent > timeout:
            raise _missing_followers(monitor, view, hopeless, timeout)
        time.sleep(pause_after(time.monotonic() - began))


def pause_after(waited: float) -> float:
    """Return the seconds until the next look, a fiftieth of the wait so far, within limits.

    Each look reads the states of all processes: ten a second for half an hour cost 47 s of
    processor time.
    """
    return min(LONGEST_PAUSE, max(2 * POLL, waited / 50))


def wait_for_first_step(run: Run, resumed: bool, patience: float = STEP_PATIENCE) -> bool:
    """Wait until a step has been committed; False when that takes longer than `patience`."""
    monitor = RunMonitor(run)
    before: int | None = None if resumed else 0
    until = time.monotonic() + patience
    while time.monotonic() < until:
        view = monitor.observe()
        if view.state in OVER:
            return False
        step = (view.training or {}).get("step")
        if step is not None:
            if before is not None and step > before:
                return True
            before = step if before is None else before
        time.sleep(2 * POLL)
    return False


def job_failure(monitor: RunMonitor, view: RunView) -> LauncherError:
    """Return the error with the reason of the leader's end."""
    leader = view.run.plan.leader
    if view.processes[leader.name].exit_code == BudgetStopError.exit_code:
        return OverBudgetError(f"run {view.run.run_id} {view.outcome}: {view.reason}")
    ending = view.processes[leader.name].last_end or view.processes[leader.name].state
    reason = f": {view.reason}" if view.reason else ""
    return JobFailedError(
        f"run {view.run.run_id} {view.state}: {leader.name} ended ({ending}){reason}",
        _last_log_lines(monitor, view, leader),
    )


def _is_at_work(view: RunView) -> bool:
    """Whether the leader works; a student may wait long for its first shard."""
    if view.run.plan.leader.role == "student":
        return view.training is not None
    return view.state == "running"


def _describe_joined(view: RunView) -> str:
    """Return `2 of 3 workers have joined`."""
    plan = view.run.plan
    expected = plan.workers or plan.followers
    joined = sum(map(view.takes_part, expected))
    if not joined:
        return f"no {'worker' if plan.workers else 'process'} has joined"
    kind = "workers" if plan.workers else "processes"
    return f"{joined} of {len(expected)} {kind} have joined"


def _missing_followers(
    monitor: RunMonitor, view: RunView, hopeless: Sequence[ProcessPlan], timeout: float
) -> LauncherError:
    leader = view.run.plan.leader
    missing = view.missing_processes or [leader]
    names = ", ".join(f"{p.name} ({_describe_process(view, p)})" for p in hopeless or missing)
    when = "" if hopeless else f" within {timeout:.0f} s"
    details = [line for process in missing for line in _last_log_lines(monitor, view, process)]
    if len(view.missing_processes) == len(view.run.plan.followers):
        details += _last_log_lines(monitor, view, leader)
    return PartialError(
        f"{_describe_joined(view)}{when}; missing: {names}; everything was stopped", details
    )


def _describe_process(view: RunView, process: ProcessPlan) -> str:
    state = view.processes[process.name]
    return ", ".join(part for part in (state.state, state.last_end) if part)


def _last_log_lines(monitor: RunMonitor, view: RunView, process: ProcessPlan) -> list[str]:
    """Return a heading and the last log lines of a process."""
    lines = monitor.last_lines(process)
    attempt = view.processes[process.name].attempt
    heading = (
        f"{process.name} on {process.host}, attempt {attempt}, {_describe_process(view, process)}:"
    )
    return [heading, *(f"  {line}" for line in lines or ["(no output)"])]
