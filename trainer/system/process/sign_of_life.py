"""Signs of life: what a living process changes now and then, in a folder or for a peer.

Others notice only that it changed, and measure the silence between by their own clock, so the
clocks of two hosts need not agree.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress


def give_signs(give: Callable[[], object], interval: float) -> threading.Event:
    """Call `give` every `interval` seconds from a thread until the returned event is set.

    The process may be busy meanwhile. After an OSError the next call follows all the same.
    """
    ended = threading.Event()

    def keep() -> None:
        while not ended.wait(interval):
            with suppress(OSError):
                give()

    threading.Thread(target=keep, name="sign-of-life", daemon=True).start()
    return ended


class Silence:
    """The seconds for which a listener has heard no new sign of life.

    Args:
        longest: seconds between two `hear`s beyond which nobody listened, so that they do not
            count: the listener was suspended, or waited for a share.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, longest: float = math.inf
    ) -> None:
        self._clock, self._longest = clock, longest
        self.sign: object = None
        """The last one heard."""
        self._heard = clock()
        self.seconds = 0.0
        """At the last `hear`."""

    def hear(self, sign: object = None) -> float:
        """Return the silence until now, which a sign ends that differs from the last one.

        None: there is no sign, or it could not be read.
        """
        now = self._clock()
        if sign is not None and sign != self.sign:
            self.sign, self.seconds = sign, 0.0
        elif now - self._heard <= self._longest:
            self.seconds += now - self._heard
        self._heard = now
        return self.seconds
