"""SIGTERM ends a long computation at once, but never in the middle of a write."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.system.process.stop_signals import handle_stop_signals


class Interrupted(BaseException):
    """A stop was requested; not an Exception, so that no error handler catches it."""


class Interruption:
    """SIGTERM, SIGINT and SIGHUP, which interrupt the main thread only inside `allow_signals`.

    A forward ends between two of its operations. Work that must be finished, such as writing a
    shard, is done outside or in another thread.
    """

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._reason = ""
        self._open = False

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals, and restore the handlers at the end; in the main thread."""
        before = handle_stop_signals(self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def allow_signals(self) -> Iterator[None]:
        """Let a signal, also an earlier one, raise `Interrupted` in the block."""
        self._open = True
        try:
            self.raise_if_interrupted()
            yield
        finally:
            self._open = False
        self.raise_if_interrupted()

    def sleep(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: by a signal.
        """
        with self.allow_signals():
            self._requested.wait(seconds)

    def raise_if_interrupted(self) -> None:
        """Raise `Interrupted` after a signal: finalisers and callbacks may have swallowed it."""
        if self._requested.is_set():
            raise Interrupted(self._reason)

    def set_reason(self, reason: str) -> None:
        """Name the reason of a signal that this process is about to send itself."""
        self._reason = self._reason or reason

    def _on_signal(self, number: signal.Signals) -> None:
        self._reason = self._reason or f"stopped by {number.name}"
        self._requested.set()
        if self._open:
            self._open = False  # a second signal must not disturb the handling of the first
            raise Interrupted(self._reason)
