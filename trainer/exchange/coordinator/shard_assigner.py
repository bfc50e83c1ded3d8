"""Assign the samples of a task to workers, also when they are reassigned. Pure."""

from __future__ import annotations

import math

from trainer.config.exchange import ExchangeConfig
from trainer.exchange.coordinator.balancer import Balancer
from trainer.exchange.coordinator.gradient_sum import GradientSum
from trainer.exchange.coordinator.ledger import Ledger, Shard
from trainer.exchange.coordinator.outbox import Outbox
from trainer.exchange.coordinator.task import Task, TaskDurations
from trainer.exchange.policies.step_policy import StepTerms
from trainer.exchange.protocol.members import Membership
from trainer.exchange.protocol.messages import Kind
from trainer.exchange.protocol.schedule import StepPlan


class ShardAssigner:
    """Cuts samples into shards and assigns them; keeps an estimate of each worker's speed."""

    def __init__(self, membership: Membership, outbox: Outbox, settings: ExchangeConfig) -> None:
        self.balancer = Balancer(settings.split)
        self.durations = TaskDurations(settings.join_deadline, settings.step_deadline)
        self._membership = membership
        self._outbox = outbox
        self._next_shard = 0

    def list_ready_ranks(self) -> list[int]:
        """Return the ranks that can be assigned samples."""
        return [member.rank for member in self._membership.list_ready()]

    def cut_shards(self, start: int, assignments: dict[int, int]) -> list[Shard]:
        """Return consecutive shards of the given sizes, in rank order."""
        shards: list[Shard] = []
        for rank in sorted(assignments):
            if assignments[rank]:
                shards.append(Shard(self._next_shard, rank, start, start + assignments[rank]))
                self._next_shard += 1
                start += assignments[rank]
        return shards

    def _record_assignments(self, assignments: dict[int, int]) -> None:
        """Record the members' samples of a step, and log which have become idle or active."""
        enough = sum(assignments.values()) >= len(assignments)
        for member in self._membership.list_ready():
            member.samples = assignments[member.rank]
            idle = enough and member.samples == 0
            if member.rank in self.balancer.tried or idle == member.idle:
                continue
            member.idle = idle
            if idle:
                self._outbox.emit("idle", rank=member.rank, reason="would slow the step")
            else:
                self._outbox.emit("active", rank=member.rank)

    def open_task(
        self,
        kind: Kind,
        step: int,
        epoch: int,
        samples: range,
        assignments: dict[int, int],
        now: float,
        sums: GradientSum | None = None,
    ) -> Task:
        """Return a task with a shard of its samples for each share."""
        columns = 1 + (len(sums.layout.blocks) if sums else 0)
        return Task(
            kind=kind,
            step=step,
            epoch=epoch,
            ledger=Ledger(columns, self.cut_shards(samples.start, assignments)),
            sums=sums,
            started=now,
            deadline=now
            + self.durations.compute_limit(kind, self.balancer.estimate_seconds(assignments)),
        )

    def open_step(
        self, step: int, plan: StepPlan, terms: StepTerms, sums: GradientSum, now: float
    ) -> Task:
        """Return a step of a plan, divided among the members by their speed.

        An inner step is divided among its workers evenly: all take steps of one size,
        and a worker with a larger share takes more of them.
        """
        at = plan.find_samples(step)
        assignments = self.balancer.divide_samples(at.stop - at.start, self.list_ready_ranks())
        self._record_assignments(assignments)
        if terms.inner_steps:
            self.durations.expect_outer_steps(terms.inner_steps)
        samples = range(at.start, at.stop)
        task = self.open_task("train", step, at.epoch, samples, assignments, now, sums)
        task.codec, task.in_bf16 = terms.codec, terms.in_bf16
        task.flushes_residuals = terms.flushes_residuals
        if terms.inner_steps:
            task.inner_batch_size = max(1, round(plan.batch_size / len(task.ledger.initial_shards)))
            task.time_limit = self.balancer.compute_limit(assignments)
        return task

    def assign_shard(self, task: Task, shard: Shard, now: float) -> None:
        """Send a shard to its worker."""
        member = next(
            member for member in self._membership.list_ready() if member.rank == shard.rank
        )
        task.sent_at[shard.id] = now
        self._outbox.send(member, task.make_assignment(shard), task.step)

    def reassign_shard(self, task: Task, shard: Shard, now: float) -> None:
        """Reassign what is missing of a shard to all ready members."""
        ranks = self.list_ready_ranks()
        if not ranks:
            task.orphans.append(shard)
            task.deadline = math.inf
            return
        self._replace_shard(task, shard, ranks, now)

    def shorten_shard(self, task: Task, shard: Shard, samples: int, now: float) -> None:
        """Count the first samples of a shard for its worker, and assign the rest to the others.

        Raises:
            ProtocolError: see `Task.split_shard`.
        """
        kept, rest = task.split_shard(shard, samples)
        others = [rank for rank in self.list_ready_ranks() if rank != shard.rank]
        self._replace_shard(task, rest, others or [shard.rank], now, kept)

    def _replace_shard(
        self, task: Task, shard: Shard, ranks: list[int], now: float, kept: Shard | None = None
    ) -> None:
        assignments = self.balancer.divide_proportionally(shard.size, ranks)
        pieces = self.cut_shards(shard.start, assignments)
        task.ledger.replace_shard(shard.id, [*([kept] if kept else []), *pieces])
        load = {r: sum(s.size for s in task.ledger.list_open(r)) for r in ranks}
        deadline = now + self.durations.compute_limit(
            task.kind, self.balancer.estimate_seconds(load)
        )
        if math.isfinite(task.deadline):
            deadline = max(deadline, task.deadline)
        task.deadline = deadline
        self._outbox.emit(
            "reassigned",
            rank=shard.rank,
            samples=shard.size,
            ranks=[p.rank for p in pieces],
            **({"completed_samples": kept.size} if kept else {}),
        )
        for piece in pieces:
            self.assign_shard(task, piece, now)
