"""Delay system calls at random, so that a test which passes only by luck fails.

Python imports this at its start, since `tests.conftest` puts this folder on PYTHONPATH where
`MOTLEY_TEST_JITTER` is set; its value is the seed. Standard library only, and little of it: every
process that a test starts imports it.

A call is delayed with a probability of 0.2, by 0 to 0.5 s: on average 50 ms, so a tier takes two to
three times as long. Delayed are what one process does and another one waits for or reads: after
`fsync`, `rename`, `replace`, `link`, `connect` and the start of a process (in the parent, and in a
forked child), and before a signal is sent.

Delayed are the processes that a test starts: only they begin with its name in their environment.
pytest's own are delayed before a signal alone, since a test that forks and writes in a loop would
take minutes. The delays of a process follow from the seed, the test and the process's role: its
words but for paths, ports and numbers, which differ from run to run. Their order among threads is
that in which they call.

Not reached: programs that are not Python (ssh, rsync, bash), Python with -I, -E or -S, what starts
with an environment of its own (systemd units, logins by ssh), what pytest forks itself, and calls
from C and C++.
"""

from __future__ import annotations

import _posixsubprocess
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

PROBABILITY = 0.2
LONGEST = 0.5
"""Seconds."""
SEED = "MOTLEY_TEST_JITTER"
TEST = "PYTEST_CURRENT_TEST"
_WORD = re.compile(r"[A-Za-z_.-][\w.-]*")


class Jitter:
    """The delays of this process."""

    def __init__(self) -> None:
        self._fork = 0
        self._seeded_for: tuple[str, ...] = ()
        self._random = random.Random()

    def sleep(self) -> None:
        """Sleep at random."""
        test = os.environ.get(TEST, "").rpartition(" ")[0]  # without (setup) or (call)
        program, *words = getattr(sys, "argv", None) or [""]
        role = " ".join([program.rpartition("/")[2], *filter(_WORD.fullmatch, words)])
        described = (os.environ.get(SEED, ""), test, role, str(self._fork))
        if described != self._seeded_for:
            self._seeded_for = described
            self._random.seed("\n".join(described))
        if self._random.random() < PROBABILITY:
            time.sleep(LONGEST * self._random.random())

    def begin_fork(self) -> None:
        """Delay a forked child, which from now on has delays of its own."""
        self._fork += 1
        self.sleep()


def delay_after(module: Any, name: str, jitter: Jitter) -> None:
    """Let a function sleep after its work."""
    call: Callable[..., Any] = getattr(module, name)

    @wraps(call)
    def delayed(*arguments: Any, **options: Any) -> Any:
        found = call(*arguments, **options)
        jitter.sleep()
        return found

    setattr(module, name, delayed)


def delay_before(module: Any, name: str, jitter: Jitter) -> None:
    """Let a function sleep before its work."""
    call: Callable[..., Any] = getattr(module, name)

    @wraps(call)
    def delayed(*arguments: Any, **options: Any) -> Any:
        jitter.sleep()
        return call(*arguments, **options)

    setattr(module, name, delayed)


def install(jitter: Jitter) -> None:
    """Delay the calls of this process and of those that it forks."""
    for name in ("fsync", "fdatasync", "rename", "replace", "link"):
        delay_after(os, name, jitter)
    for name in ("connect", "connect_ex"):
        delay_after(socket.socket, name, jitter)
    delay_after(_posixsubprocess, "fork_exec", jitter)
    os.register_at_fork(after_in_parent=jitter.sleep, after_in_child=jitter.begin_fork)


def delay_signals(jitter: Jitter) -> None:
    """Delay those that this process sends."""
    for module, names in ((os, ("kill", "killpg")), (signal, ("pidfd_send_signal",))):
        for name in names:
            delay_before(module, name, jitter)


if os.environ.get(SEED):
    _jitter = Jitter()
    delay_signals(_jitter)
    if TEST in os.environ:
        install(_jitter)
