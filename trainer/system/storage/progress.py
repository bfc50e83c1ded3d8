"""The progress of a long operation before training, as a line in the log and for the supervisor.

`reading train.jsonl: 412,000 of 1,000,000 rows, 31 s left`. A supervised process writes the line to
the file that its supervisor names, and a worker or rank that has not joined reports it to the
others (`latest_progress`); whoever waits for it sees a heartbeat whenever the count changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from trainer.system.process.child import PROGRESS_VARIABLE
from trainer.system.regular_file import open_file
from trainer.system.storage.atomic_file import replace_file

log = logging.getLogger(__name__)

LOG_INTERVAL = 10.0
"""Seconds between two lines in the log."""
REPORT_INTERVAL = 1.0
"""Seconds between two lines in the file."""
Unit = Literal["rows", "bytes"]


class Progress:
    """Counts the rows, or the bytes, of one operation.

    Args:
        what: begins the line, such as `reading train.jsonl`.
        total: rows in all; None if they are not known.
        report: takes the line every second.
        unit: of what is counted; the line has bytes as MiB.
    """

    counted = 0
    """All that this process has counted so far, of whatever operation and unit."""
    last: Progress | None = None
    """The operation that this process began last."""

    def __init__(
        self,
        what: str,
        total: int | None,
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        unit: Unit = "rows",
    ) -> None:
        self._what, self._total, self._report, self._clock = what, total, report, clock
        self._unit: Unit = unit
        self._began = self._logged = self._reported = clock()
        self._done = 0

    def advance(self, count: int = 1) -> None:
        """Count what is done."""
        self._done += count
        Progress.counted += count
        now = self._clock()
        if now - self._reported >= REPORT_INTERVAL:
            self._reported = now
            self._report(self.line)
        if now - self._logged >= LOG_INTERVAL:
            self._logged = now
            log.info("%s", self.line)

    @property
    def line(self) -> str:
        """The line, with the time that is left."""
        if self._total is None or self._total < self._done or not self._done:
            return self.amount
        left = (self._clock() - self._began) * (self._total - self._done) / self._done
        return f"{self.amount}, {left:,.0f} s left"

    @property
    def amount(self) -> str:
        """The line without the time: it changes with the count alone."""
        total = self._total
        known = total is not None and total >= self._done
        counts = [self._done, total] if known and total is not None else [self._done]
        if self._unit == "bytes":
            return f"{self._what}: {' of '.join(f'{count / 2**20:,.1f}' for count in counts)} MiB"
        return f"{self._what}: {' of '.join(f'{count:,}' for count in counts)} rows"


def latest_progress() -> tuple[int, str]:
    """Return all that this process has counted so far, and the amount of its last operation."""
    last = Progress.last
    return Progress.counted, last.amount if last else "starting to read"


@contextmanager
def report_progress(what: str, total: int | None = None, unit: Unit = "rows") -> Iterator[Progress]:
    """Yield a counter of the rows or bytes of an operation; remove its report at the end."""
    named = os.environ.get(PROGRESS_VARIABLE)
    path = Path(named) if named else None

    def report(line: str) -> None:
        if path is not None:
            with contextlib.suppress(OSError):
                replace_file(path, line)

    progress = Progress.last = Progress(what, total, report, unit=unit)
    try:
        yield progress
    finally:
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def read_chunks(path: Path, verb: str) -> Iterator[bytes]:
    """Yield a regular file in chunks of at most a MiB, and report the progress.

    Raises:
        OSError: see `open_file`, or it cannot be read.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        with report_progress(f"{verb} {path.name}", size, "bytes") as progress:
            while chunk := file.read(1 << 20):  # if mapped, a file that shrinks would kill
                yield chunk
                progress.advance(len(chunk))
