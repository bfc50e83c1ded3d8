"""The proof that all workers hold the same weights (F-DP-001). Pure.

Now and then a commit asks every worker for the digest of its weights. An answer that is wrong, or
that does not come, is a fault. The state that a worker proves when it joins counts as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.protocol.messages import WeightsReport
from trainer.system.errors import ProtocolError


@dataclass
class AuditRequest:
    """The request of one commit: the digest of the weights after `at` updates."""

    at: int
    digest: str
    """The coordinator's digest; empty for the initial state, of which no report is expected."""
    pending: dict[int, float] = field(default_factory=dict[int, float])
    """The ranks whose proof is pending, and its deadline."""
    confirmed: set[int] = field(default_factory=set[int])
    failed: set[int] = field(default_factory=set[int])
    """The ranks whose proof was wrong, or did not come in time."""
    verified: bool = False
    """Whether the event was sent."""


class WeightAudit:
    """The open requests of a run, the oldest first; the newest one stays when it is answered."""

    def __init__(self, outbox: Outbox, diverged: dict[int, int], at: int) -> None:
        """Begin after `at` updates; `diverged` counts each rank's wrong answers."""
        self._outbox = outbox
        self._diverged = diverged
        self._requests = [AuditRequest(at, "", verified=True)]

    @property
    def is_pending(self) -> bool:
        """Whether a proof is pending."""
        return any(request.pending for request in self._requests)

    def open_request(self, at: int, digest: str, ranks: Collection[int], due: float) -> None:
        """Expect the digest of the weights after `at` updates from these ranks until `due`."""
        self._requests = [request for request in self._requests if request.pending]
        self._requests.append(AuditRequest(at, digest, dict.fromkeys(ranks, due)))

    def record_report(self, rank: int, report: WeightsReport) -> None:
        """Record a report; one about an older state than any open request is ignored.

        Raises:
            ProtocolError: it shows other weights, or is about a state that was not asked for.
        """
        at = report.step + 1
        if at > self._requests[-1].at:
            raise ProtocolError(f"a report on the weights after step {at}, which was not requested")
        request = next((q for q in self._requests if q.at == at and q.digest), None)
        if request is None:
            return
        if report.digest != request.digest:
            request.failed.add(rank)
            self._diverged[rank] = self._diverged.get(rank, 0) + 1
            self._outbox.emit("diverged", rank=rank, at_step=at, digest=report.digest)
            raise ProtocolError(f"its weights differ after step {at}")
        self._confirm_rank(request, rank)

    def add_rank(self, rank: int, at: int, due: float) -> None:
        """Record that a rank proved the whole state after `at` updates when it joined.

        Commits that were sent while it took that state in are still before it: of those that asked
        for a proof it owes one until `due`.
        """
        for request in self._requests:
            if request.at > at and rank not in request.confirmed:  # it may have caught up first
                request.pending[rank] = due
            elif request.at == at:
                request.failed.discard(rank)
                self._confirm_rank(request, rank)

    def remove_rank(self, rank: int) -> None:
        """Remove a lost rank from all pending requests."""
        for request in self._requests:
            request.pending.pop(rank, None)
            self._emit_verified(request)

    def find_late(self, now: float) -> dict[int, int]:
        """Return the ranks whose proof is overdue, and the step that it is about."""
        late: dict[int, int] = {}
        for request in self._requests:
            for rank, due in request.pending.items():
                if now > due:
                    request.failed.add(rank)
                    late.setdefault(rank, request.at)
        return late

    def postpone_deadlines(self, seconds: float) -> None:
        """Postpone all deadlines by the seconds that this process was suspended."""
        for request in self._requests:
            request.pending = {rank: due + seconds for rank, due in request.pending.items()}

    def describe_gap(self, at: int) -> str:
        """Return why it is not proved that all workers hold the state after `at` updates.

        Empty when at least one worker proved it, and all that were there did.
        """
        newest = self._requests[-1]
        unproved = sorted(newest.failed | newest.pending.keys())
        if newest.at == at and unproved:
            listed = ", ".join(map(str, unproved))
            return f"rank {listed} did not prove that it holds the state after step {at}"
        if newest.at != at or not newest.confirmed:
            return f"no worker proved that it holds the state after step {at}"
        return ""

    def _confirm_rank(self, request: AuditRequest, rank: int) -> None:
        request.pending.pop(rank, None)
        request.confirmed.add(rank)
        self._emit_verified(request)

    def _emit_verified(self, request: AuditRequest) -> None:
        """Emit `verified` once, when the last proof is in."""
        if request.verified or request.pending or not request.confirmed:
            return
        request.verified = True
        ranks = sorted(request.confirmed)
        self._outbox.emit("verified", at_step=request.at, digest=request.digest, ranks=ranks)
