"""How SIGTERM ends a runner at once, but never between the two halves of something."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """The runner was asked to end; not an Exception, so that no task takes it for its own."""


class Interruption:
    """SIGTERM and SIGINT, which interrupt only where they are let in."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._open = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take the signals, and give them back at the end; in the main thread."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal, or one that came before, raise `Interrupted` in here."""
        self._open = True
        try:
            self._check()
            yield
        finally:
            self._open = False
        self._check()  # what runs in here may have swallowed it, as `__del__` and callbacks do

    def wait(self, seconds: float) -> None:
        """Sleep.

        Raises:
            Interrupted: a signal came.
        """
        with self.allowed():
            self._asked.wait(seconds)

    def _check(self) -> None:
        if self._asked.is_set():
            raise Interrupted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked.set()
        if self._open:
            self._open = False  # the second signal must not disturb what the first one began
            raise Interrupted
