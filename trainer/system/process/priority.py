"""The scheduling priority of threads that exchange gradients.

A step ends with its last average, so a thread that receives, sums or sends gradients and waits for
a processor delays all workers. It needs little processor time itself.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NICENESS = -10
"""Niceness of a raised thread: about ten times the processor time of one with 0 (sched(7))."""


@contextmanager
def raise_thread_priority() -> Iterator[int]:
    """Lower the niceness of the calling thread as far as is allowed, and yield what it is then.

    Root may always lower it, others to `20 - RLIMIT_NICE`, which is `LimitNICE=` in systemd's
    units. Linux keeps a niceness for each thread; a new thread or process has that of the one that
    starts it.
    """
    before = _read_niceness()
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    allowed = -20 if limit == resource.RLIM_INFINITY else 20 - limit
    for niceness in (NICENESS, max(NICENESS, allowed)):
        if niceness < _read_niceness():
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
    try:
        yield _read_niceness()
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def reset_thread_priority() -> None:
    """Give the calling thread niceness 0 if it has a lower one from the thread that started it."""
    if _read_niceness() < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _read_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)
