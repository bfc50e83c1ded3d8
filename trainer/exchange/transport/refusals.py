"""What is said of connections that are not let in: few lines, however many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

INTERVAL = 10.0
"""Seconds that one summary covers."""
LINES = 10
"""Refusals in an interval that get a line of their own."""
_HOSTS = 64
"""Addresses that are counted one by one in an interval."""


class Refusals:
    """Hands events of refusals on, or counts them and sums them up once an interval."""

    def __init__(self, emit: Callable[[dict[str, Any]], None], now: float) -> None:
        self._emit = emit
        self._began = now
        self._lines = 0
        self._reasons: Counter[str] = Counter()
        self._hosts: Counter[str] = Counter()

    def say(self, event: dict[str, Any]) -> None:
        """Emit an event with the refused peer and the reason, unless there were many."""
        if self._lines < LINES:
            self._lines += 1
            self._emit(event)
        else:
            self._reasons["refused for other reasons"] += 1

    def count(self, host: str, reason: str) -> None:
        """Count a connection that came to nothing; `reason` is one of a few fixed texts."""
        self._reasons[reason] += 1
        known = host in self._hosts or len(self._hosts) < _HOSTS
        self._hosts[host if known else "other addresses"] += 1

    def sum_up(self, now: float, at_once: bool = False) -> None:
        """Emit the summary of an interval that is over; call this often."""
        if now - self._began < INTERVAL and not at_once:
            return
        if total := self._reasons.total():
            reasons = ", ".join(f"{count} {text}" for text, count in self._reasons.most_common())
            hosts = ", ".join(f"{host} ({count})" for host, count in self._hosts.most_common(3))
            reason = f"{total} connections in {now - self._began:.0f} s: {reasons}"
            self._emit(
                {"event": "refused", "reason": reason + (f"; from {hosts}" if hosts else "")}
            )
        self._began, self._lines = now, 0
        self._reasons.clear()
        self._hosts.clear()
