"""A request to stop: set by a signal handler, checked during long operations."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask to stop; that of a closed terminal unless `nohup` runs it."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))


def handle_stop_signals(handler: Callable[[signal.Signals], object]) -> dict[signal.Signals, Any]:
    """Install a handler for the signals that ask to stop; return the handlers before it."""
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def handle(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:  # a terminal that is gone fails every write
            with contextlib.suppress(OSError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                for descriptor in terminals:
                    os.dup2(nothing, descriptor)
        handler(signal.Signals(number))

    return {number: signal.signal(number, handle) for number in stop_signals()}


class StopRequest:
    """The reason to end early; empty, and false, until a stop is requested.

    Not an Event: its lock could be held by the code that a signal interrupts.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def request(self, reason: str) -> None:
        """Request a stop; the first reason counts."""
        self.reason = self.reason or reason
