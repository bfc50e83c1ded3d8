"""Joining members: which have caught up, and for which the run waits. Pure.

A state of gigabytes travels for minutes while the run goes on, and what it does meanwhile waits
behind the state. Where a step takes longer than its averages need on the joiner's link, that
dissolves by itself. Where it does not, each further step would cost more time than it saves, and
memory; so the run may be a few steps ahead of a joiner, then it waits.
"""

from __future__ import annotations

from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.members import Member, Membership

AHEAD = 4
"""Steps that the run may be ahead of a joiner: a state is three gradients, and one to spare."""

_SILENT = 1.0
"""Seconds that the run waits without saying so."""


class Joiners:
    """Looks at the members that are not ready; `streams` are sent to each in a step."""

    def __init__(
        self, membership: Membership, outbox: Outbox, streams: int, patience: float
    ) -> None:
        self._membership = membership
        self._outbox = outbox
        self._limit = AHEAD * streams
        self._patience = patience
        self._since: float | None = None
        self._told = False

    def caught_up(self) -> list[Member]:
        """Return those that proved their state and took all that was sent since."""
        return [member for member in self._joining() if member.proved and not _waiting(member)]

    def arriving(self) -> bool:
        """Return whether something is still on its way to one of them."""
        return any(map(_waiting, self._joining()))

    def behind(self, now: float) -> list[Member]:
        """Return those that the next commit waits for."""
        behind = [
            member
            for member in self._joining()
            if _waiting(member) and (member.proved or _waiting(member) > self._limit)
        ]
        if not behind:
            self._since, self._told = None, False
        elif self._since is None:
            self._since = now
        return behind

    def overdue(self, now: float) -> list[Member]:
        """Return those that the run has waited for long enough; call this on every tick."""
        behind = self.behind(now)
        waited = 0.0 if self._since is None else now - self._since
        if waited > _SILENT and not self._told:
            self._told = True
            for member in behind:
                reason = "the next commit waits until it has caught up"
                self._outbox.emit("behind", rank=member.rank, reason=reason)
        return behind if waited > self._patience else []

    def _joining(self) -> list[Member]:
        return [member for member in self._membership if not member.ready]


def _waiting(member: Member) -> int:
    return member.delivery.waiting
