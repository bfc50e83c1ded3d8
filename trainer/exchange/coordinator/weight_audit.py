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
class Question:
    """The request of one commit: the digest of the weights after `at` updates."""

    at: int
    digest: str
    """Ours; empty for the state that the run began with, of which no report is due."""
    owing: dict[int, float] = field(default_factory=dict[int, float])
    """The ranks whose proof is out, and until when it may be."""
    confirmed: set[int] = field(default_factory=set[int])
    failed: set[int] = field(default_factory=set[int])
    """The ranks whose proof was wrong, or did not come in time."""
    verified: bool = False
    """Whether the event was sent."""


class WeightAudit:
    """The open questions of a run, the oldest first; the newest one stays when it is answered."""

    def __init__(self, outbox: Outbox, diverged: dict[int, int], at: int) -> None:
        """Begin after `at` updates; `diverged` counts each rank's wrong answers."""
        self._outbox = outbox
        self._diverged = diverged
        self._questions = [Question(at, "", verified=True)]

    @property
    def pending(self) -> bool:
        """Whether proofs are still out."""
        return any(question.owing for question in self._questions)

    def ask(self, at: int, digest: str, ranks: Collection[int], due: float) -> None:
        """Expect the digest of the weights after `at` updates from these ranks until `due`."""
        self._questions = [question for question in self._questions if question.owing]
        self._questions.append(Question(at, digest, dict.fromkeys(ranks, due)))

    def answer(self, rank: int, report: WeightsReport) -> None:
        """Take a report in; one about an older state than any open question is of no interest.

        Raises:
            ProtocolError: it shows other weights, or is about a state that was not asked for.
        """
        at = report.step + 1
        if at > self._questions[-1].at:
            raise ProtocolError(f"a report on the weights after step {at}, which was not asked for")
        question = next((q for q in self._questions if q.at == at and q.digest), None)
        if question is None:
            return
        if report.digest != question.digest:
            question.failed.add(rank)
            self._diverged[rank] = self._diverged.get(rank, 0) + 1
            self._outbox.emit("diverged", rank=rank, at=at, digest=report.digest)
            raise ProtocolError(f"its weights differ after step {at}")
        self._confirm(question, rank)

    def joined(self, rank: int, at: int, due: float) -> None:
        """Note that a rank proved the whole state after `at` updates when it joined.

        Commits that were sent while it took that state in are still before it: of those that asked
        for a proof it owes one until `due`.
        """
        for question in self._questions:
            if question.at > at and rank not in question.confirmed:  # it may have caught up first
                question.owing[rank] = due
            elif question.at == at:
                question.failed.discard(rank)
                self._confirm(question, rank)

    def lost(self, rank: int) -> None:
        """Wait no longer for a rank that is gone."""
        for question in self._questions:
            question.owing.pop(rank, None)
            self._say(question)

    def late(self, now: float) -> dict[int, int]:
        """Return the ranks that owe a proof past its time, and of which state."""
        late: dict[int, int] = {}
        for question in self._questions:
            for rank, due in question.owing.items():
                if now > due:
                    question.failed.add(rank)
                    late.setdefault(rank, question.at)
        return late

    def postpone(self, seconds: float) -> None:
        """Move all deadlines: it was this process that slept."""
        for question in self._questions:
            question.owing = {rank: due + seconds for rank, due in question.owing.items()}

    def gap(self, at: int) -> str:
        """Return what is missing of the proof that all workers hold the state after `at` updates.

        Empty when at least one worker proved it, and all that were there did.
        """
        newest = self._questions[-1]
        unproved = sorted(newest.failed | newest.owing.keys())
        if newest.at == at and unproved:
            listed = ", ".join(map(str, unproved))
            return f"rank {listed} did not prove that it holds the state after step {at}"
        if newest.at != at or not newest.confirmed:
            return f"no worker proved that it holds the state after step {at}"
        return ""

    def _confirm(self, question: Question, rank: int) -> None:
        question.owing.pop(rank, None)
        question.confirmed.add(rank)
        self._say(question)

    def _say(self, question: Question) -> None:
        """Emit `verified` once, when the last proof is in."""
        if question.verified or question.owing or not question.confirmed:
            return
        question.verified = True
        ranks = sorted(question.confirmed)
        self._outbox.emit("verified", at=question.at, digest=question.digest, ranks=ranks)
