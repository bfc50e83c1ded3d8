"""The end of one process's log, read in the background, for the live view."""

from __future__ import annotations

import threading

from launcher.errors import LauncherError
from launcher.plan.plan import ProcessPlan
from launcher.runs.status import RunMonitor

_EVERY = 1.0
_LINES = 10


class LiveLog:
    """Reads the log of the process that is shown; of none while nothing is."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor
        self._process: ProcessPlan | None = None
        self._lines: tuple[str, ...] = ()
        self._closed = False
        self._asked = threading.Condition()
        threading.Thread(target=self._read, name="live log", daemon=True).start()

    def show(self, process: ProcessPlan | None) -> tuple[str, ...]:
        """Choose the process; return the last lines that are known of it, without waiting."""
        with self._asked:
            if process is not self._process:
                self._process, self._lines = process, ()
                self._asked.notify()
            return self._lines

    def close(self) -> None:
        """Stop reading."""
        with self._asked:
            self._closed = True
            self._asked.notify()

    def _read(self) -> None:
        while True:
            with self._asked:
                self._asked.wait_for(lambda: self._closed or self._process is not None)
                if self._closed:
                    return
                process = self._process
            assert process is not None
            try:
                lines = tuple(self._monitor.last_lines(process, _LINES))
            except (LauncherError, OSError) as error:
                lines = (f"(no log: {error})",)
            with self._asked:
                if process is self._process:
                    self._lines = lines
                    self._asked.wait(_EVERY)
