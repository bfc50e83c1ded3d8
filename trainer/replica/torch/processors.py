"""The number of threads on the CPU: as many as there are otherwise idle processors.

The threads of a product wait for each other, and spin while they do. If another process holds one
of their processors, each product takes until the scheduler resumes the last thread: two threads
beside a busy process are slower than one (docs/decisions.md).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from trainer.system import cgroups

INTERVAL = 1.0
"""Seconds between two measurements."""
_NEARLY_FREE = 0.25
"""A processor of which others use less than this is free."""
_SLOWER, _FOR = 3.0, 10.0
"""The factor by which, and the seconds for which, a slowdown must last to be logged."""


class ProcessorUsage(NamedTuple):
    """Seconds since some moment in the past."""

    clock: float
    busy: float
    """Busy time of all processors together."""
    own: float
    """Processor time of this process."""
    stolen: float
    """Time of all processors that the hypervisor gave to other guests."""


def count_usable_processors() -> int:
    """Return how many processors this process may use."""
    if psutil.LINUX:
        return cgroups.count_processors(len(os.sched_getaffinity(0)))
    return psutil.cpu_count() or 1


def read_usage() -> ProcessorUsage:
    """Return the usage so far.

    Processes of lower priority than this one give way, and do not count as busy.
    """
    times = psutil.cpu_times()
    busy = times.user + times.system
    if psutil.LINUX:
        busy += times.irq + times.softirq + times.steal
        if os.nice(0) > 0:
            busy += times.nice
    stolen = times.steal if psutil.LINUX else 0.0
    return ProcessorUsage(time.monotonic(), busy, time.process_time(), stolen)


class Processors:
    """Determines the number of threads.

    Args:
        most: the maximum.
        count: the processors that this process may use.
        look: reads the usage.
    """

    def __init__(
        self, most: int, count: int | None = None, look: Callable[[], ProcessorUsage] = read_usage
    ) -> None:
        self._most = most
        self._count = count_usable_processors() if count is None else count
        self._look = look
        self._last = self._look()
        self._threads = most

    def count_threads(self) -> int:
        """Return the current number."""
        now, last = self._look(), self._last
        elapsed = now.clock - last.clock
        if elapsed >= INTERVAL:
            others = max(0.0, (now.busy - last.busy) - (now.own - last.own)) / elapsed
            free = int(self._count - others + _NEARLY_FREE)
            self._threads, self._last = min(self._most, max(1, free)), now
        return self._threads


class SpeedWatch:
    """Reports once that a computation became much slower, with the machine's state."""

    def __init__(self, look: Callable[[], ProcessorUsage] = read_usage) -> None:
        self._look = look
        self._best = 0.0
        self._slow_since: ProcessorUsage | None = None
        self._reported = False

    def observe(self, tokens: int, seconds: float) -> str | None:
        """Record a computation; return a line if there is one to log."""
        if self._reported or tokens == 0 or seconds <= 0:
            return None
        speed = tokens / seconds
        if speed * _SLOWER >= self._best:
            self._best, self._slow_since = max(self._best, speed), None
            return None
        now = self._look()
        if self._slow_since is None:
            self._slow_since = now
            return None
        elapsed = now.clock - self._slow_since.clock
        if elapsed < _FOR:
            return None
        self._reported = True
        others = (now.busy - self._slow_since.busy) - (now.own - self._slow_since.own)
        stolen = now.stolen - self._slow_since.stolen
        return (
            f"computes {speed:,.0f} tokens/s, was {self._best:,.0f}: other processes use"
            f" {max(0.0, others) / elapsed:.1f} of {os.cpu_count()} processors,"
            f" {max(0.0, stolen) / elapsed:.1f} are taken by the hypervisor{_describe_throttling()}"
        )


def _describe_throttling() -> str:
    """Return how often a processor was throttled for its temperature."""
    found = Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count")
    try:
        count = sum(int(file.read_text(encoding="ascii")) for file in found)
    except (OSError, ValueError):
        return ""
    return f", {count} times throttled by temperature since the machine started" if count else ""
