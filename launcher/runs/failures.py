"""Failures since the last view: the processes that failed, with their last log lines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launcher.runs.processes.session import SUPERVISOR_LOST, ProcessState
from launcher.runs.status import RunMonitor, RunView

LINES = 8
"""Lines of a log that are shown."""

_BAD = frozenset({"backoff", "failed", "lost"})


@dataclass(frozen=True)
class Failure:
    """One failed attempt of a process."""

    heading: str
    log_lines: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The failure for people, heading first."""
        return [self.heading, *(f"  {line}" for line in self.log_lines or ["(no output)"])]


class FailureWatch:
    """Compares successive views of a run. Failures that recovered before the first are omitted."""

    def __init__(self, monitor: RunMonitor, without: Collection[str] = ()) -> None:
        """`without` are the processes whose logs are shown anyway."""
        self._monitor = monitor
        self._without = frozenset(without)
        self._ended: dict[str, int] = {}
        """The last attempt of each process whose end is known."""

    def new_failures(self, view: RunView) -> list[Failure]:
        """Return the failures since the previous look."""
        found: list[Failure] = []
        for process in view.run.plan.processes:
            state = view.processes[process.name]
            if process.name in self._without or state.state in ("absent", "unreachable"):
                continue
            ended = _last_ended(state)
            before = self._ended.get(process.name)
            if before is None:
                before = ended - 1 if state.state in _BAD else ended
            self._ended[process.name] = ended
            if ended > before and (state.exit_code or state.signal or state.state == "lost"):
                what = state.last_end or SUPERVISOR_LOST
                after = {"failed": "for good", "lost": "for good"}.get(state.state, "starts again")
                heading = (
                    f"{process.name} on {process.host}: attempt {ended} ended, {what}; {after}"
                )
                lines = self._monitor.last_lines(process, LINES, ended)
                found.append(Failure(heading, tuple(lines)))
        return found


def _last_ended(state: ProcessState) -> int:
    runs = state.state in ("running", "starting", "stopping")
    return state.attempt - 1 if runs else state.attempt
