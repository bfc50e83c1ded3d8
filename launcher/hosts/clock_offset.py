"""The offset of a host's clock, of which the quickest of a few exchanges gives the best bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

SAMPLES = 3


class ClockOffset(NamedTuple):
    """Seconds that a host's clock is ahead of this machine's, within `uncertainty`."""

    uncertainty: float
    offset: float


def measure_clock_offset(
    read_remote: Callable[[], float], clock: Callable[[], float] = time.time
) -> ClockOffset:
    """Return the offset of the clock that `read_remote` reads from this machine's `clock`.

    The host reads its clock at some time between the request and the answer.
    """
    samples: list[ClockOffset] = []
    for _ in range(SAMPLES):
        before = clock()
        remote = read_remote()
        after = clock()
        samples.append(ClockOffset((after - before) / 2, remote - (before + after) / 2))
    return min(samples)
