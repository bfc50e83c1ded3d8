"""Lines of a process's log for the page: the last ones, those since a moment, or the new ones.

They come from the reader of `launch logs`. A request reads a bounded part of the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.log_pages import LogPages
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.status import RunMonitor
from launcher.terminal import visible_lines
from launcher.views.logs import choose_processes
from trainer.system.timestamp import leading_timestamp

MOST_LINES = 500
LONGEST = 400
"""Characters of a line that are shown."""
_MOST_READ = 4 << 20
"""Bytes that a request searches."""

Place = tuple[int, int]
"""An attempt, and an offset in its log."""


@dataclass(frozen=True)
class LogQuery:
    """The wanted lines."""

    words: str = ""
    """Text that they contain, in upper or lower case."""
    since: float | None = None
    """Unix seconds: lines since then; a few seconds earlier ones may be among them."""
    after: Place | None = None
    """Only the lines behind this place."""


def log_lines(monitor: RunMonitor, name: str, wanted: LogQuery) -> dict[str, Any]:
    """Return `lines` with their `timestamps`, and the place behind them as `attempt` and `end`.

    A moment is in Unix seconds, by the clock of the process's host; None for a line that does not
    begin with a time.

    Raises:
        ConfigError: the run has no such process.
        UnreachableError: its host does not answer.
    """
    (process,) = choose_processes(monitor.run, [name])
    supervisor = monitor.find_supervisor(process)
    attempts = supervisor.list_attempts(process)
    if not attempts:
        return {"attempt": 1, "end": 0, "lines": [], "timestamps": []}
    attempt, offset = _find_start(supervisor, process, attempts, wanted)
    over = attempt != attempts[-1] or supervisor.read_state(process).is_over
    words = wanted.words.casefold()
    # From a moment on the first lines count, else the last ones.
    found = deque[str](maxlen=None if wanted.since is not None else MOST_LINES)
    end = offset
    for page in LogPages(supervisor, process, attempt).read_pages(offset, whole=over):
        for line in page.lines:
            shown = [text for text in visible_lines(line) if words in text.casefold()]
            found.extend(text[:LONGEST] for text in shown)
        end = page.end
        full = wanted.since is not None and len(found) >= MOST_LINES
        if full or end - offset >= _MOST_READ:
            break
    lines = list(found)[:MOST_LINES]
    moments = [leading_timestamp(line) for line in lines]
    return {"attempt": attempt, "end": end, "lines": lines, "timestamps": moments}


def _find_start(
    supervisor: SessionSupervisor, process: ProcessPlan, attempts: list[int], wanted: LogQuery
) -> Place:
    """Return where to begin to read; always the beginning of a line."""
    if wanted.after is not None and wanted.after[0] in attempts:
        attempt, offset = wanted.after
        if offset >= supervisor.log_size(process, attempt) and attempt != attempts[-1]:
            return attempts[attempts.index(attempt) + 1], 0
        return wanted.after
    if wanted.since is not None:
        for attempt in attempts:
            begin = LogPages(supervisor, process, attempt).offset_since(wanted.since)
            if begin is not None and begin < supervisor.log_size(process, attempt):
                return attempt, begin
    pages = LogPages(supervisor, process, attempts[-1])
    if not wanted.words:
        return attempts[-1], pages.find_tail_offset(MOST_LINES)
    begin = max(0, supervisor.log_size(process, attempts[-1]) - _MOST_READ)
    if begin:
        part = supervisor.read_log(process, attempts[-1], begin, LONGEST << 8)
        begin += part.find(b"\n") + 1
    return attempts[-1], begin
