"""What went wrong since the last look: whose process ended badly, with its last words."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from launcher.runs.processes import ProcessState
from launcher.runs.status import RunMonitor, RunView

LINES = 8
"""Of a log that are shown."""

_BAD = frozenset({"backoff", "failed", "lost"})


@dataclass(frozen=True)
class Failure:
    """One attempt of a process that ended badly."""

    heading: str
    lines: tuple[str, ...]

    @property
    def text(self) -> list[str]:
        """The lines that people read."""
        return [self.heading, *(f"  {line}" for line in self.lines or ["(it wrote nothing)"])]


class FailureWatch:
    """Compares looks at one run. What had failed and recovered before the first is no news."""

    def __init__(self, monitor: RunMonitor, without: Collection[str] = ()) -> None:
        """`without` are the processes whose words are seen anyway."""
        self._monitor = monitor
        self._without = frozenset(without)
        self._ended: dict[str, int] = {}
        """The last attempt of each process of which the end is known."""

    def news(self, view: RunView) -> list[Failure]:
        """Return what has failed since the look before."""
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
                what = state.ending or "its supervisor was killed"
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
