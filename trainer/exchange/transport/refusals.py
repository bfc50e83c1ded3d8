"""Events of connections that are not admitted: few lines, however many there are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

INTERVAL = 10.0
"""Seconds in which at most `LINES` events are handed on."""
LINES = 10


class RefusalReporter:
    """Hands events of refusals on; after too many the next one says how many were left out."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self._emit = emit
        self._began = time.monotonic()
        self._lines = self._left_out = 0

    def report(self, event: dict[str, Any]) -> None:
        """Emit an event with the refused peer and the `reason`, unless there were many."""
        now = time.monotonic()
        if now - self._began >= INTERVAL:
            self._began, self._lines = now, 0
        if self._lines == LINES:
            self._left_out += 1
            return
        self._lines += 1
        if self._left_out:
            event = {**event, "reason": f"{event['reason']} ({self._left_out} more before it)"}
            self._left_out = 0
        self._emit(event)
