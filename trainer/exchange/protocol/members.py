"""The members of a run: admission, generations, and which may be assigned samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trainer.exchange.protocol.messages import JoinRequest
from trainer.exchange.protocol.state_transfer import StateDelivery
from trainer.system.errors import ProtocolError, RefusedError

MAX_DIVERGED = 3
"""Times a rank may prove other weights than ours before it stays out."""


@dataclass(frozen=True)
class Job:
    """The inputs that every member must share with the coordinator, as hex digests."""

    run_id: str
    config_digest: str
    layout_digest: str
    model_digest: str
    data_digest: str
    motley_version: str
    base_digest: str | None = None
    """Digest of the model's tensors alone: what an adapter belongs to. `model` includes it."""


@dataclass
class Member:
    """An admitted worker."""

    link: int
    rank: int
    generation: int
    """The membership epoch in which it came; frames of an earlier one are fenced off."""
    request: JoinRequest
    last_received: float
    delivery: StateDelivery = field(default_factory=StateDelivery)
    """The state that it is sent, and the frames queued after it."""
    proved: bool = False
    """Whether it proved that state."""
    step: int = 0
    """Updates that are in that state."""
    ready: bool = False
    """Whether it also caught up with the run since, and may be dealt samples."""
    samples: int = 0
    """Its samples of the current step."""
    idle: bool = False
    """Whether it gets no samples because it would slow the step down."""

    def confirm_state(self, digest: str) -> None:
        """Check and record that the worker holds a state with this digest.

        Raises:
            ProtocolError: it is not the one that was sent, or was proved before.
        """
        if self.proved or not digest or digest != self.delivery.digest:
            raise ProtocolError("the state that it proves is not the one it was sent")
        self.proved = True


class RefusalError(RefusedError):
    """The reason for refusing a worker; `retry` is true if trying again can help."""

    def __init__(self, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


Certified = int | RefusalError | None
"""The rank in a peer's certificate, why that does not count, or None on plaintext loopback."""


class Membership:
    """The members by rank, and the generation."""

    def __init__(self, job: Job, generation: int) -> None:
        self.job = job
        self.generation = generation
        self.diverged: dict[int, int] = {}
        self.slow: set[int] = set()
        """Ranks that the run waited for in vain."""
        self.seen: set[int] = set()
        """Ranks that were ever ready."""
        self._members: dict[int, Member] = {}
        self._by_link: dict[int, Member] = {}
        self._by_rank: tuple[Member, ...] = ()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_rank)

    def __len__(self) -> int:
        return len(self._members)

    def list_ready(self) -> list[Member]:
        """Return the members that can be assigned samples, by rank."""
        return [member for member in self if member.ready]

    def find_member(self, link: int) -> Member | None:
        """Return the member on a link."""
        return self._by_link.get(link)

    def admit_worker(
        self, link: int, request: JoinRequest, certified: Certified, now: float
    ) -> Member:
        """Admit a worker under a new generation.

        Raises:
            RefusalError: it runs another job, claims another rank than its certificate, or the rank
                is taken or was barred.
        """
        if isinstance(certified, RefusalError):
            raise certified
        self._check_job(request)
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
        if rank in self.slow:
            raise RefusalError(
                f"rank {rank} could not catch up while the run waited for it: its link is too slow "
                "for this model; give it more time with exchange.join_deadline, or leave it out"
            )
        if taken := self._members.get(rank):
            raise RefusalError(
                f"rank {rank} has already joined, from {taken.request.host}", retry=True
            )
        self.generation += 1
        member = Member(link, rank, self.generation, request, now)
        self._members[rank] = self._by_link[link] = member
        self._sort_members()
        return member

    def bar_rank(self, member: Member, seconds: float) -> str:
        """Bar a rank that cannot catch up, and return the reason."""
        self.slow.add(member.rank)
        return f"still behind after the run waited for it for {seconds:g} s: its link is too slow"

    def activate_member(self, member: Member) -> tuple[str, dict[str, Any]]:
        """Mark a member that has caught up as ready; return the event that records it."""
        member.ready = True
        event = "rejoined" if member.rank in self.seen else "joined"
        self.seen.add(member.rank)
        request = member.request
        return event, {
            "rank": member.rank,
            "host": request.host,
            "backend": request.backend,
            "device": request.device,
            "backend_reason": request.backend_reason,
            "transport": request.transport,
            "generation": member.generation,
        }

    def remove_member(self, member: Member) -> None:
        """Remove a member; the generation fences off whatever it still sends."""
        del self._members[member.rank], self._by_link[member.link]
        self._sort_members()
        self.generation += 1

    def _sort_members(self) -> None:
        self._by_rank = tuple(self._members[rank] for rank in sorted(self._members))

    def _check_job(self, request: JoinRequest) -> None:
        ours, theirs = self.job, request
        for what, mine, other in (
            ("run", ours.run_id, theirs.run_id),
            ("version of Motley", ours.motley_version, theirs.motley_version),
            ("config", ours.config_digest, theirs.config_digest),
            ("model or script", ours.model_digest, theirs.model_digest),
            ("gradient layout", ours.layout_digest, theirs.layout_digest),
            ("data", ours.data_digest, theirs.data_digest),
        ):
            if mine != other:
                raise RefusalError(
                    f"{what} differs: the worker has {other[:16]}, the run {mine[:16]}"
                )
