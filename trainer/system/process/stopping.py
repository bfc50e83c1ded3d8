"""A request to stop: set by a signal handler, checked during long operations."""

from __future__ import annotations

FEED = "feed"
"""The name of the thread that reads ahead; one that a hanging share blocks outlives a stop."""


class Stop:
    """The reason to end early; empty, and false, until a stop is requested.

    Not an Event: its lock could be held by the code that a signal interrupts.
    """

    def __init__(self) -> None:
        self.reason = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def ask(self, reason: str) -> None:
        """End soon; the first reason counts."""
        self.reason = self.reason or reason
