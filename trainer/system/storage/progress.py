"""The progress of a long operation before training, as a line in the log and for the supervisor.

`reading train.jsonl: 412,000 of 1,000,000 rows, 31 s left`. A supervised process writes the line to
the file that its supervisor names; whoever waits for it sees a sign of life whenever it changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.system.process.child import PROGRESS_VARIABLE
from trainer.system.storage.atomic_file import replace_file

log = logging.getLogger(__name__)

LOG_INTERVAL = 10.0
"""Seconds between two lines in the log."""
REPORT_INTERVAL = 1.0
"""Seconds between two lines in the file."""
_LOOK = 256
"""Rows between two looks at the clock."""


class Progress:
    """Counts the rows of one operation.

    Args:
        what: begins the line, such as `reading train.jsonl`.
        total: rows in all; None if they are not known.
        report: takes the line every second.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what, self._total, self._report, self._clock = what, total, report, clock
        self._began = self._logged = self._reported = clock()
        self._done = self._next = 0

    def advance(self, rows: int = 1) -> None:
        """Count rows that are done."""
        self._done += rows
        if self._done < self._next:
            return
        self._next = self._done + _LOOK
        now = self._clock()
        if now - self._reported >= REPORT_INTERVAL:
            self._reported = now
            self._report(self.line)
        if now - self._logged >= LOG_INTERVAL:
            self._logged = now
            log.info("%s", self.line)

    @property
    def line(self) -> str:
        """The line."""
        if self._total is None or self._total < self._done:
            return f"{self._what}: {self._done:,} rows"
        left = (self._clock() - self._began) * (self._total - self._done) / max(1, self._done)
        rest = f", {left:,.0f} s left" if self._done else ""
        return f"{self._what}: {self._done:,} of {self._total:,} rows{rest}"


@contextmanager
def reported(what: str, total: int | None = None) -> Iterator[Progress]:
    """Yield what counts the rows of an operation, and remove its report at the end."""
    named = os.environ.get(PROGRESS_VARIABLE)
    path = Path(named) if named else None

    def report(line: str) -> None:
        if path is not None:
            with contextlib.suppress(OSError):
                replace_file(path, line)

    try:
        yield Progress(what, total, report)
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
