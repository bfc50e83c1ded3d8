"""Who is in the run: admission, generations, and who may be dealt samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.errors import RefusedError
from trainer.exchange.messages import JoinRequest

MAX_DIVERGED = 3
"""Times a rank may prove other weights than ours before it stays out."""


@dataclass(frozen=True)
class Job:
    """What every member must have in common with the coordinator; hex digests."""

    run_id: str
    agreement: str
    layout: str
    model: str
    data: str
    version: str


@dataclass
class Member:
    """A worker that was let in."""

    link: int
    rank: int
    generation: int
    """The membership epoch in which it came; frames of an earlier one are fenced off."""
    request: JoinRequest
    last_heard: float
    expected: str
    """The digest of the state that it was sent."""
    ready: bool = False
    """Whether it proved that state and may be dealt samples."""
    samples: int = 0
    """Its share of the current step."""
    benched: bool = False
    """Whether it gets no samples because it would slow the step down."""


class RefusalError(RefusedError):
    """Why a worker is not let in; `retry` says whether trying again can help."""

    def __init__(self, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


class Roster:
    """The members by rank, and the generation."""

    def __init__(self, job: Job, generation: int) -> None:
        self.job = job
        self.generation = generation
        self.diverged: dict[int, int] = {}
        self.seen: set[int] = set()
        """Ranks that were ever ready."""
        self._members: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(sorted(self._members.values(), key=lambda member: member.rank))

    def __len__(self) -> int:
        return len(self._members)

    def ready(self) -> list[Member]:
        """Return the members that can be dealt samples, by rank."""
        return [member for member in self if member.ready]

    def by_link(self, link: int) -> Member | None:
        """Return the member on a link."""
        return next((member for member in self._members.values() if member.link == link), None)

    def admit(
        self, link: int, request: JoinRequest, certified: int | None, expected: str, now: float
    ) -> Member:
        """Let a worker in under a new generation.

        `certified` is the rank in its certificate, None on a plaintext loopback link.

        Raises:
            RefusalError: it runs another job, claims another rank than its certificate, or the rank
                is taken.
        """
        self._compare(request)
        rank = request.rank if request.rank is not None else certified
        if rank is None:
            rank = next(rank for rank in range(len(self._members) + 1) if rank not in self._members)
        if certified is not None and rank != certified:
            raise RefusalError(
                f"the certificate is of rank {certified}, the worker claims rank {rank}"
            )
        if self.diverged.get(rank, 0) >= MAX_DIVERGED:
            raise RefusalError(
                f"rank {rank} computed other weights {MAX_DIVERGED} times: check its memory and "
                "packages, then restart the run"
            )
        if taken := self._members.get(rank):
            raise RefusalError(
                f"rank {rank} is already here, from {taken.request.host}", retry=True
            )
        self.generation += 1
        member = Member(link, rank, self.generation, request, now, expected)
        self._members[rank] = member
        return member

    def remove(self, member: Member) -> None:
        """Take a member out; the generation fences off whatever it still sends."""
        del self._members[member.rank]
        self.generation += 1

    def _compare(self, request: JoinRequest) -> None:
        ours, theirs = self.job, request
        for what, mine, other in (
            ("run", ours.run_id, theirs.run_id),
            ("version of Motley", ours.version, theirs.version),
            ("config", ours.agreement, theirs.agreement),
            ("model", ours.model, theirs.model),
            ("gradient layout", ours.layout, theirs.layout),
            ("data", ours.data, theirs.data),
        ):
            if mine != other:
                raise RefusalError(
                    f"another {what}: the worker has {other[:16]}, the run {mine[:16]}"
                )
