"""Joining members: those that have caught up, and those that the run waits for. Pure.

A state of gigabytes travels for minutes while the run goes on, and what it does meanwhile waits
behind the state. Where a step takes longer than its averages need on the joiner's link, that
dissolves by itself. Where it does not, each further step would cost more time than it saves, and
memory; so the run may be a few steps ahead of a joiner, then it waits.
"""

from __future__ import annotations

from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.members import Member, Membership

PREFETCH_STEPS = 4
"""Steps that the run may be ahead of a joiner: a state is three gradients, and one to spare."""

_LOG_AFTER = 1.0
"""Seconds that the run waits before it logs that."""


class Joiners:
    """The members that are not ready; `streams` are sent to each in a step."""

    def __init__(
        self, membership: Membership, outbox: Outbox, streams: int, patience: float
    ) -> None:
        self._membership = membership
        self._outbox = outbox
        self._limit = PREFETCH_STEPS * streams
        self._patience = patience
        self._since: float | None = None
        self._logged = False

    def find_caught_up(self) -> list[Member]:
        """Return the members that proved their state and received all that was sent since."""
        return [
            member
            for member in self._list_joining()
            if member.proved and not _count_waiting(member)
        ]

    def has_waiting_streams(self) -> bool:
        """Return whether frames to one of them are still queued."""
        return any(map(_count_waiting, self._list_joining()))

    def find_lagging(self, now: float) -> list[Member]:
        """Return the members that the next commit waits for."""
        behind = [
            member
            for member in self._list_joining()
            if _count_waiting(member) and (member.proved or _count_waiting(member) > self._limit)
        ]
        if not behind:
            self._since, self._logged = None, False
        elif self._since is None:
            self._since = now
        return behind

    def find_overdue(self, now: float) -> list[Member]:
        """Return the members whose time to catch up is over; call this on every tick."""
        behind = self.find_lagging(now)
        waited = 0.0 if self._since is None else now - self._since
        if waited > _LOG_AFTER and not self._logged:
            self._logged = True
            for member in behind:
                reason = "the next commit waits until it has caught up"
                self._outbox.emit("lagging", rank=member.rank, reason=reason)
        return behind if waited > self._patience else []

    def _list_joining(self) -> list[Member]:
        return [member for member in self._membership if not member.ready]


def _count_waiting(member: Member) -> int:
    return member.delivery.waiting
