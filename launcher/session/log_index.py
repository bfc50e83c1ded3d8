"""Time marks of a log: `attempt-N.times` beside `attempt-N.log`, with lines `UNIX-SECONDS SIZE`.

The lines of a log need not have timestamps. While the log grows, the supervisor records its size
every few seconds, so `launch logs --since` knows where to begin: everything before a mark was
written before it. Standard library only.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import time
from pathlib import Path

GRANULARITY = 5.0
"""Seconds between marks: `--since` shows at most this much more than was asked for."""


class LogMarks:
    """Writes the marks of one log. Failures to write are ignored; training continues."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._marks = log.with_name(marks_name(log.name))
        self._size: int = -1
        self._taken = float("-inf")
        self._torn = False

    def take_mark(self, unless_younger_than: float = 0.0) -> None:
        """Note the size now; nothing when it is as it was, or the last mark is that young."""
        now = time.monotonic()
        if now - self._taken < unless_younger_than:
            return
        with contextlib.suppress(OSError):
            size = self._log.stat().st_size if self._log.exists() else 0
            if size == self._size and unless_younger_than:
                return
            # A full disk takes a part of a line, which the next one must not continue.
            begin = "\n" if self._torn else ""
            line = f"{begin}{time.time():.3f} {size}\n".encode()
            with self._marks.open("ab", buffering=0) as stream:
                self._torn = stream.write(line) < len(line)
            self._size, self._taken = size, now


def marks_name(log: str) -> str:
    """Return the name of the file with the marks of a log."""
    return f"{log.removesuffix('.log')}.times"


def find_offset(marks: bytes, moment: float) -> int | None:
    """Return how long the log surely was at a moment: all that came later lies behind that.

    None when there are no marks, as on a full disk.
    """
    times, sizes = _read_marks(marks)
    if not times:
        return None
    position = bisect.bisect_right(times, moment)
    return sizes[position - 1] if position else 0


def _read_marks(marks: bytes) -> tuple[list[float], list[int]]:
    """Return the moments of marks, and how long the log was at each; both only grow."""
    times: list[float] = []
    sizes: list[int] = []
    for line in marks.splitlines():
        words = line.split()
        with contextlib.suppress(ValueError):  # a torn line of a full disk
            if len(words) == 2 and math.isfinite(float(words[0])):
                taken, size = float(words[0]), int(words[1])
                times.append(max([taken, *times[-1:]]))  # a clock that was set back
                sizes.append(size)
    return times, sizes
