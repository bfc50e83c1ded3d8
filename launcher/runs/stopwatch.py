"""The time that each phase of a command took, from the start of its process."""

from __future__ import annotations

import os
import time

from launcher.session.processes import identify_process


class Stopwatch:
    """Laps of one command, in seconds; the first begins with the process itself."""

    def __init__(self) -> None:
        me = identify_process(os.getpid())
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._began = now if me is None else min(now, me.start / os.sysconf("SC_CLK_TCK"))
        self._last = self._began
        self.laps: dict[str, float] = {}

    def end_lap(self, name: str) -> None:
        """End a lap; one of the same name is continued."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.laps[name] = round(self.laps.get(name, 0.0) + now - self._last, 3)
        self._last = now

    @property
    def total(self) -> float:
        """Seconds from the beginning to the end of the last lap."""
        return round(self._last - self._began, 3)

    def seconds_by_lap(self) -> dict[str, float]:
        """Return the laps and their sum for programs."""
        return {**self.laps, "total": self.total}

    def describe_laps(self) -> str:
        """Return the laps for people: `8.1 s: connect 0.4, preflight 1.9, ...`."""
        return f"{self.total:.1f} s: " + ", ".join(f"{n} {s:.1f}" for n, s in self.laps.items())
