"""Waiting for what nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

PATIENCE = 240.0
"""Seconds that anything may take before a test gives up: a busy machine may stand still."""
_Value = TypeVar("_Value")


class Logged(Protocol):
    """What has logs to show beside a failure."""

    def logs(self) -> str:
        """Return their tails."""
        ...


def wait_for(
    ready: Callable[[], _Value],
    what: str,
    cluster: Logged | None = None,
    seconds: float = PATIENCE,
) -> _Value:
    """Wait until `ready` returns something true and return it.

    A look that takes long, such as a command, leaves the cores to what it waits for: four times as
    long, or two seconds.
    """
    deadline = time.monotonic() + seconds
    began = time.monotonic()
    while not (value := ready()):
        now = time.monotonic()
        if now > deadline:
            tails = cluster.logs() if cluster else ""
            raise AssertionError(f"{what}: not within {seconds:g} s\n{tails}")
        time.sleep(min(max(0.02, 4 * (now - began)), max(2.0, now - began)))
        began = time.monotonic()
    return value
