"""Signs of life, and the silence between them by a listener's own clock."""

from __future__ import annotations

import threading

from tests.trainer.clock import Clock
from tests.waiting import PATIENCE
from trainer.system.process.heartbeat import HeartbeatMonitor, start_heartbeat


def test_signs_go_on_after_one_that_failed_and_end() -> None:
    given, twice = 0, threading.Event()

    def give() -> None:
        nonlocal given
        given += 1
        if given == 1:
            raise OSError("the share is away")
        twice.set()
        ended.set()

    ended = start_heartbeat(give, 0.01)
    assert twice.wait(PATIENCE)
    assert given == 2


def test_only_another_sign_ends_the_silence() -> None:
    clock = Clock(100.0)
    silence = HeartbeatMonitor(clock)
    for sign, after, seconds in (("a", 5, 0), ("a", 3, 3), (None, 4, 7), ("b", 1, 0), (None, 2, 2)):
        clock.now += after
        assert silence.observe(sign) == silence.seconds == seconds


def test_time_in_which_nobody_listened_does_not_count() -> None:
    clock = Clock()
    silence = HeartbeatMonitor(clock, longest=10.0)
    for after, seconds in ((10, 10), (11, 10), (5000, 10), (9, 19)):
        clock.now += after
        assert silence.observe() == seconds
