"""Connections that have not joined: silent ones end soon, workers that read may take long. Pure.

A worker that reads its data reports how far it is on a connection of its own, before its request to
join. The wait for workers goes on while the count of one of them grows; one whose count does not
grow for as long is ended, and named. One that shows no certificate of a rank where certificates are
needed, more than one of a rank, and more than `READERS` in all are closed at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.exchange.protocol.members import Certified, RefusalError
from trainer.exchange.protocol.messages import JoinRequest, ReadProgress
from trainer.system.errors import ProtocolError

JOIN_REQUEST_TIMEOUT = 5.0
"""Seconds that a connection has to send its JoinRequest, or its next report of what it reads."""
MAX_READERS = 16
"""Workers that report what they read at a time: while one of them does, the others may wait."""
MAX_REPORTED = 3
"""Workers that have not joined and that the end of a run names."""


@dataclass
class _PendingConnection:
    certified: Certified
    since: float
    """Time of its arrival or of its last report."""
    reading: ReadProgress | None = None
    moved: float = 0.0
    """Time at which its count last grew."""


class PendingConnections:
    """The connections that have not joined, by link.

    Args:
        patience: seconds that a count may stay the same.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._arrivals: dict[int, _PendingConnection] = {}
        self._last: dict[tuple[int | None, str], ReadProgress] = {}
        """The last reports of workers that have not joined since, by rank and host."""
        self.moved = -math.inf
        """Time at which the count of any of them last grew."""

    def __contains__(self, link: int) -> bool:
        return link in self._arrivals

    def add(self, link: int, certified: Certified, now: float) -> None:
        """Add a connection."""
        self._arrivals[link] = _PendingConnection(certified, now)

    def discard(self, link: int) -> None:
        """Forget a connection that is closed; what it read is remembered until its rank joins."""
        self._arrivals.pop(link, None)

    def admit(self, link: int, request: JoinRequest) -> Certified:
        """Take out a connection that asks to join, and return what its certificate says."""
        certified = self._arrivals.pop(link).certified
        rank = certified if isinstance(certified, int) else request.rank
        for key in ((rank, request.host), (None, request.host)):
            self._last.pop(key, None)
        return certified

    def record_reading(self, link: int, reading: ReadProgress, now: float) -> None:
        """Record how far a worker has read.

        Raises:
            ProtocolError: it may not hold a connection for this.
        """
        arrival = self._arrivals[link]
        if isinstance(arrival.certified, RefusalError):
            raise ProtocolError(str(arrival.certified))
        if isinstance(arrival.certified, int) and reading.rank != arrival.certified:
            reading = reading.model_copy(update={"rank": arrival.certified})
        before, arrival.since = arrival.reading, now
        if before is None:
            others = [other.reading for other in self._arrivals.values() if other.reading]
            if len(others) >= MAX_READERS:
                raise ProtocolError(f"{MAX_READERS} workers already report what they read")
            if reading.rank is not None and any(o.rank == reading.rank for o in others):
                raise ProtocolError(f"rank {reading.rank} already reports what it reads")
            # A first report proves nothing: one that hangs might connect again and again.
            arrival.moved = now
        elif reading.count > before.count:
            arrival.moved = self.moved = now
        key = reading.rank, reading.host
        self._last.pop(key, None)  # the last report comes last
        arrival.reading = self._last[key] = reading
        if len(self._last) > MAX_READERS:
            del self._last[next(iter(self._last))]

    def find_silent(self, now: float) -> list[int]:
        """Return the links that neither sent a JoinRequest nor a report in time."""
        return [
            link for link, each in self._arrivals.items() if now - each.since > JOIN_REQUEST_TIMEOUT
        ]

    def find_stuck(self, now: float) -> list[tuple[int, ReadProgress, str]]:
        """Return the links of workers whose count does not grow, their last report, and why."""
        return [
            (link, reading, f"no progress for {self._patience:.0f} s: {_describe_reading(reading)}")
            for link, each in self._arrivals.items()
            if (reading := each.reading) and now - each.moved > self._patience
        ]

    def list_readers(self) -> list[int]:
        """Return the links of workers that read."""
        return [link for link, arrival in self._arrivals.items() if arrival.reading]

    def describe_stuck(self, joined: Sequence[int]) -> str:
        """Return how far workers have read that have not joined; empty if none was seen."""
        missing = [each for each in self._last.values() if each.rank not in joined]
        return "".join(f"; {_describe_reading(each)}" for each in missing[:MAX_REPORTED])

    def postpone_deadlines(self, slept: float, now: float) -> None:
        """Postpone all deadlines by the seconds that this process was suspended."""
        self.moved = min(now, self.moved + slept)
        for arrival in self._arrivals.values():
            arrival.since = min(now, arrival.since + slept)
            arrival.moved = min(now, arrival.moved + slept)


def _describe_reading(reading: ReadProgress) -> str:
    return reading.describe_stop("a worker" if reading.rank is None else f"rank {reading.rank}")
