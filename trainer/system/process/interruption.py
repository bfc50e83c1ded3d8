"""SIGTERM ends a long computation at once, but never in the middle of a write."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.system.process.stopping import on_stop_signals


class Interrupted(BaseException):
    """A stop was requested; not an Exception, so that no error handler catches it."""


class Interruption:
    """SIGTERM, SIGINT and SIGHUP, which interrupt the main thread only inside `allowed`.

    A forward ends between two of its operations. Work that must be finished, such as writing a
    shard, is done outside or in another thread.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._reason = ""
        self._open = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle the signals, and restore the handlers at the end; in the main thread."""
        before = on_stop_signals(self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal, also an earlier one, raise `Interrupted` in the block."""
        self._open = True
        try:
            self.check()
            yield
        finally:
            self._open = False
        self.check()

    def wait(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: by a signal.
        """
        with self.allowed():
            self._asked.wait(seconds)

    def check(self) -> None:
        """Raise `Interrupted` after a signal: finalisers and callbacks may have swallowed it."""
        if self._asked.is_set():
            raise Interrupted(self._reason)

    def give(self, reason: str) -> None:
        """Name the reason of a signal that this process is about to send itself."""
        self._reason = self._reason or reason

    def _on_signal(self, number: signal.Signals) -> None:
        self._reason = self._reason or f"stopped by {number.name}"
        self._asked.set()
        if self._open:
            self._open = False  # a second signal must not disturb the handling of the first
            raise Interrupted(self._reason)
