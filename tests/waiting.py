"""Waiting for what nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

PATIENCE = 90.0
"""Seconds that anything may take before a test gives up: far more than it needs when idle."""
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
    """Wait until `ready` returns something true and return it."""
    deadline = time.monotonic() + seconds
    while not (value := ready()):
        if time.monotonic() > deadline:
            tails = cluster.logs() if cluster else ""
            raise AssertionError(f"{what}: not within {seconds:g} s\n{tails}")
        time.sleep(0.02)
    return value
