"""Lines of a process's log for the page: the last ones, those since a moment, or the new ones.

They come from the reader of `launch logs`. A request reads a bounded part of the log.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.plan.plan import ProcessPlan
from launcher.runs.processes.log_pages import LogPages
from launcher.runs.processes.session import SessionSupervisor
from launcher.runs.status import RunMonitor
from launcher.terminal import visible_lines
from launcher.views.logs import choose

MOST_LINES = 500
LONGEST = 400
"""Characters of a line that are shown."""
_MOST_READ = 4 << 20
"""Bytes that a request searches."""
_TIME = re.compile(r"\d\d:([0-5]\d):([0-5]\d)\b")
_QUARTER = 900
"""Seconds: time zones are multiples of a quarter of an hour apart."""

Place = tuple[int, int]
"""An attempt, and an offset in its log."""


@dataclass(frozen=True)
class Wanted:
    """The wanted lines."""

    words: str = ""
    """What they contain, in upper or lower case."""
    since: float | None = None
    """Unix seconds: lines since then; a few seconds earlier ones may be among them."""
    after: Place | None = None
    """Only the lines behind this place."""


def log_lines(monitor: RunMonitor, name: str, wanted: Wanted) -> dict[str, Any]:
    """Return `lines` with their `moments`, and the place behind them as `attempt` and `end`.

    A moment is in Unix seconds, by the clock of the process's host; None for a line that does not
    begin with a time, or of which nothing tells the hour.

    Raises:
        ConfigError: the run has no such process.
        UnreachableError: its host does not answer.
    """
    (process,) = choose(monitor.run, [name])
    supervisor = monitor.supervisor(process)
    attempts = supervisor.attempts(process)
    if not attempts:
        return {"attempt": 1, "end": 0, "lines": [], "moments": []}
    attempt, offset = _beginning(supervisor, process, attempts, wanted)
    over = attempt != attempts[-1] or supervisor.state(process).is_over
    words = wanted.words.casefold()
    # From a moment on the first lines count, else the last ones.
    found = deque[tuple[str, int]](maxlen=None if wanted.since is not None else MOST_LINES)
    end = offset
    for page in LogPages(supervisor, process, attempt).pages(offset, whole=over):
        behind = end
        for line in page.lines:
            behind = min(behind + len(line) + 1, page.end)
            shown = [text for text in visible_lines(line) if words in text.casefold()]
            found.extend((text[:LONGEST], behind) for text in shown)
        end = page.end
        full = wanted.since is not None and len(found) >= MOST_LINES
        if full or end - offset >= _MOST_READ:
            break
    lines = list(found)[:MOST_LINES]
    times, sizes = supervisor.log_marks(process, attempt, lines[0][1]) if lines else ([], [])
    if not over:  # what no mark tells of yet was written just now
        times, sizes = [*times, time.time()], [*sizes, max(end, *sizes[-1:])]
    return {
        "attempt": attempt,
        "end": end,
        "lines": [text for text, _ in lines],
        "moments": [_moment(text, behind, times, sizes) for text, behind in lines],
    }


def _moment(line: str, behind: int, times: Sequence[float], sizes: Sequence[int]) -> int | None:
    """Return when a line was written that ends at an offset, from the marks of its log."""
    at, mark = _TIME.match(line), bisect_left(sizes, behind)
    if at is None or mark == len(sizes):
        return None
    near = round(times[mark])  # a mark is taken within seconds
    second = 60 * int(at[1]) + int(at[2])
    return near + (second - near + _QUARTER // 2) % _QUARTER - _QUARTER // 2


def _beginning(
    supervisor: SessionSupervisor, process: ProcessPlan, attempts: list[int], wanted: Wanted
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
        return attempts[-1], pages.offset_of_tail(MOST_LINES)
    begin = max(0, supervisor.log_size(process, attempts[-1]) - _MOST_READ)
    if begin:
        part = supervisor.read_log(process, attempts[-1], begin, LONGEST << 8)
        begin += part.find(b"\n") + 1
    return attempts[-1], begin
