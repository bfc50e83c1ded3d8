"""Being asked to stop: noted by a signal handler, looked at wherever something takes long."""

from __future__ import annotations


class Stop:
    """Why the program should end early; empty, and false, until a stop is requested.

    No Event: its lock could be held by the very code that a signal interrupts.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """End soon; the first reason counts."""
        self.reason = self.reason or reason
