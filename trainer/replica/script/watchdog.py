"""The end of a process whose script does not return."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Self

from trainer.system.errors import UnreachableError

log = logging.getLogger(__name__)


class Watchdog:
    """A thread that ends the process if a block of its main thread takes longer than allowed.

    The block may be in C code, which no exception reaches.

    Args:
        script: whose line is named.
        limit: seconds.
    """

    def __init__(self, script: Path, limit: float) -> None:
        self._script, self._limit = script, limit
        self._due = float("inf")
        self._watched = threading.get_ident()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._due = time.monotonic() + self._limit
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._due = float("inf")

    def _watch(self) -> None:
        pause = min(1.0, self._limit / 4)
        while time.monotonic() < self._due:
            time.sleep(pause)
        frames = traceback.extract_stack(sys._current_frames().get(self._watched))
        lines = [frame.lineno for frame in frames if frame.filename == str(self._script)]
        where = f"{self._script}:{lines[-1]}" if lines else str(self._script)
        log.error(
            "%s: has not returned for %g s (exchange.join_deadline); the process ends",
            where,
            self._limit,
        )
        logging.shutdown()
        os._exit(UnreachableError.exit_code)
