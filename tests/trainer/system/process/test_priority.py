"""A raised thread's niceness, by what its user may do."""

from __future__ import annotations

import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.system.process.priority import NICENESS, raise_thread_priority, reset_thread_priority


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def test_a_thread_is_raised_alone_and_what_it_starts_can_be_reset() -> None:
    """As far as this user may: root down to -10, others mostly not at all."""
    seen: list[int] = []

    def run() -> None:
        with raise_thread_priority() as said:
            threads = ThreadPoolExecutor(1), ThreadPoolExecutor(1, "", reset_thread_priority)
            seen.extend([said, niceness(), *(one.submit(niceness).result() for one in threads)])
        seen.append(niceness())

    before = niceness()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raised = NICENESS if os.geteuid() == 0 else seen[0]
    assert seen == [raised, raised, raised, max(0, raised), before]
    assert niceness() == before


@pytest.mark.parametrize(
    ("limit", "reached"),
    [(40, -10), (30, -10), (25, -5), (20, 0), (0, 0), (resource.RLIM_INFINITY, -10)],
)
def test_without_root_the_limit_of_the_unit_decides(
    monkeypatch: pytest.MonkeyPatch, limit: int, reached: int
) -> None:
    """The rules of setpriority(2), played by the test: few machines let a test raise its limit."""
    now = 0

    def set_priority(which: int, who: int, wanted: int) -> None:
        nonlocal now
        assert (which, who) == (os.PRIO_PROCESS, 0)
        if wanted < now and 0 <= limit < 20 - wanted:
            raise PermissionError
        now = wanted

    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(os, "getpriority", lambda which, who: now)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with raise_thread_priority() as said:
        assert (said, now) == (reached, reached)
    assert now == 0
