"""Assign the samples of a round to workers, also when they are dealt again. Pure."""

from __future__ import annotations

import math

from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.gradient_sum import GradientSum
from trainer.exchange.coordinator.ledger import Ledger, Shard
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.rounds import Round, RoundTimes
from trainer.exchange.coordinator.shares import Balancer
from trainer.exchange.policies.every_step import StepTerms
from trainer.exchange.protocol.members import Membership
from trainer.exchange.protocol.messages import Kind
from trainer.exchange.protocol.schedule import StepPlan


class Dealer:
    """Cuts samples into shards and hands them out; knows how long each worker needs for its own."""

    def __init__(self, membership: Membership, outbox: Outbox, settings: ExchangeConfig) -> None:
        self.balancer = Balancer(settings.shares)
        self.pace = RoundTimes(settings.join_deadline, settings.step_deadline)
        self._membership = membership
        self._outbox = outbox
        self._next_shard = 0

    def ranks(self) -> list[int]:
        """Return the ranks that can be dealt samples."""
        return [member.rank for member in self._membership.ready()]

    def cut(self, start: int, shares: dict[int, int]) -> list[Shard]:
        """Return consecutive shards of the given sizes, in rank order."""
        shards: list[Shard] = []
        for rank in sorted(shares):
            if shares[rank]:
                shards.append(Shard(self._next_shard, rank, start, start + shares[rank]))
                self._next_shard += 1
                start += shares[rank]
        return shards

    def _note_shares(self, shares: dict[int, int]) -> None:
        """Note the members' shares of a step, and log which have become idle or active."""
        enough = sum(shares.values()) >= len(shares)
        for member in self._membership.ready():
            member.samples = shares[member.rank]
            idle = enough and member.samples == 0
            if member.rank in self.balancer.tried or idle == member.idle:
                continue
            member.idle = idle
            if idle:
                self._outbox.emit("idle", rank=member.rank, reason="would slow the step")
            else:
                self._outbox.emit("active", rank=member.rank)

    def open(
        self,
        kind: Kind,
        step: int,
        epoch: int,
        samples: range,
        shares: dict[int, int],
        now: float,
        sums: GradientSum | None = None,
    ) -> Round:
        """Return a round with a shard of its samples for each share."""
        columns = 1 + (len(sums.layout.blocks) if sums else 0)
        return Round(
            kind=kind,
            step=step,
            epoch=epoch,
            ledger=Ledger(columns, self.cut(samples.start, shares)),
            sums=sums,
            started=now,
            deadline=now + self.pace.allowance(kind, self.balancer.expected(shares)),
        )

    def open_step(
        self, step: int, plan: StepPlan, terms: StepTerms, sums: GradientSum, now: float
    ) -> Round:
        """Return a step of a plan, divided among the members by their speed.

        An inner step of a round is divided among its workers evenly: all take steps of one size,
        and a worker with a larger share takes more of them.
        """
        at = plan.at(step)
        shares = self.balancer.divide(at.stop - at.start, self.ranks())
        self._note_shares(shares)
        if terms.inner_steps:
            self.pace.expect_rounds(terms.inner_steps)
        samples = range(at.start, at.stop)
        round_ = self.open("train", step, at.epoch, samples, shares, now, sums)
        round_.settled, round_.codec = terms.settled, terms.codec
        if terms.inner_steps:
            round_.inner_batch = max(1, round(plan.batch_size / len(round_.ledger.dealt)))
            round_.limit = self.balancer.limit(shares)
        return round_

    def assign(self, round_: Round, shard: Shard, now: float) -> None:
        """Send a shard to its worker."""
        member = next(member for member in self._membership.ready() if member.rank == shard.rank)
        round_.sent_at[shard.id] = now
        self._outbox.send(member, round_.assignment(shard), round_.step)

    def redeal(self, round_: Round, shard: Shard, now: float) -> None:
        """Deal what a shard still owes to all members."""
        ranks = self.ranks()
        if not ranks:
            round_.orphans.append(shard)
            round_.deadline = math.inf
            return
        self._deal(round_, shard, ranks, now)

    def shorten(self, round_: Round, shard: Shard, samples: int, now: float) -> None:
        """Count the first samples of a shard for its worker, and deal the rest to the others.

        Raises:
            ProtocolError: see `Round.shortened`.
        """
        kept, rest = round_.shortened(shard, samples)
        others = [rank for rank in self.ranks() if rank != shard.rank]
        self._deal(round_, rest, others or [shard.rank], now, kept)

    def _deal(
        self, round_: Round, shard: Shard, ranks: list[int], now: float, kept: Shard | None = None
    ) -> None:
        shares = self.balancer.proportional(shard.size, ranks)
        pieces = self.cut(shard.start, shares)
        round_.ledger.redeal(shard.id, [*([kept] if kept else []), *pieces])
        load = {r: sum(s.size for s in round_.ledger.open_shards(r)) for r in ranks}
        deadline = now + self.pace.allowance(round_.kind, self.balancer.expected(load))
        if math.isfinite(round_.deadline):
            deadline = max(deadline, round_.deadline)
        round_.deadline = deadline
        self._outbox.emit(
            "redealt",
            rank=shard.rank,
            samples=shard.size,
            to=[p.rank for p in pieces],
            **({"handed_in": kept.size} if kept else {}),
        )
        for piece in pieces:
            self.assign(round_, piece, now)
