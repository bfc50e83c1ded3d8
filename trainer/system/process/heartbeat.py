"""Heartbeats: what a living process changes now and then, in a folder or for a peer.

Others notice only that it changed, and measure the silence between by their own clock, so the
clocks of two hosts need not agree.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress


def start_heartbeat(send: Callable[[], object], interval: float) -> threading.Event:
    """Call `send` every `interval` seconds from a thread until the returned event is set.

    The process may be busy meanwhile. After an OSError the next call follows all the same.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval):
            with suppress(OSError):
                send()

    threading.Thread(target=repeat, name="heartbeat", daemon=True).start()
    return ended


class HeartbeatMonitor:
    """The seconds for which an observer has seen no new heartbeat.

    Args:
        longest: seconds between two `observe`s beyond which nobody looked, so that they do not
            count: the observer was suspended, or waited for a shared folder.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, longest: float = math.inf
    ) -> None:
        self._clock, self._longest = clock, longest
        self.last: object = None
        """The last heartbeat seen."""
        self._observed = clock()
        self.seconds = 0.0
        """At the last `observe`."""

    def observe(self, heartbeat: object = None) -> float:
        """Return the silence until now, which a heartbeat ends that differs from the last one.

        None: there is none, or it could not be read.
        """
        now = self._clock()
        if heartbeat is not None and heartbeat != self.last:
            self.last, self.seconds = heartbeat, 0.0
        elif now - self._observed <= self._longest:
            self.seconds += now - self._observed
        self._observed = now
        return self.seconds
