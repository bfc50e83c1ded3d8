"""Brings a simulated cluster to a chosen moment of a step."""

from __future__ import annotations

from typing import TypeVar

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.coordinator.task import Task

AnyCluster = TypeVar("AnyCluster", bound=SimulatedCluster)


def started(problem: ExactProblem, workers: int = 3, expect: int | None = None) -> SimulatedCluster:
    """Return a cluster whose workers hold their first assignment and have done nothing yet."""
    return begun(SimulatedCluster(problem, workers, expect))


def begun(cluster: AnyCluster) -> AnyCluster:
    """Bring a new cluster to where its workers hold their first assignment."""
    for worker in cluster.workers:
        cluster.connect(worker)
    for worker in cluster.workers:
        cluster.deliver_up(worker)  # requests
    for worker in cluster.workers:
        cluster.deliver_down(worker)  # states
    for worker in cluster.workers:
        cluster.deliver_up(worker)  # proofs; the last one begins the step
    assert cluster.machine.phase == "running"
    return cluster


def assign(cluster: SimulatedCluster, *workers: SimulatedWorker) -> None:
    """Bring the assignments and let the loops take them up."""
    for worker in workers or cluster.workers:
        cluster.deliver_down(worker)
        worker.step()  # Restored


def compute(worker: SimulatedWorker, blocks: int | None = None) -> None:
    """Let a worker compute so many blocks, or all and the result."""
    count = 0
    while (blocks is None or count < blocks) and worker.step():
        count += 1


def open_round(cluster: SimulatedCluster) -> Task:
    assert cluster.machine.training.task
    return cluster.machine.training.task


def covered(shards: list[Shard]) -> set[int]:
    """Return the samples of shards that do not overlap."""
    samples = [position for shard in shards for position in range(shard.start, shard.stop)]
    assert len(samples) == len(set(samples))
    return set(samples)


def redealt(cluster: SimulatedCluster) -> list[tuple[int, list[int]]]:
    return [(event["rank"], event["ranks"]) for event in cluster.named("reassigned")]


def until_step(cluster: SimulatedCluster, step: int) -> None:
    while cluster.step < step:
        assert cluster.finish is None, cluster.finish
        cluster.go_on()
    cluster.run_until_idle()


def until_validating(cluster: SimulatedCluster) -> None:
    while not (task := cluster.machine.training.task) or task.kind == "train":
        cluster.go_on()


def saved(cluster: SimulatedCluster) -> list[tuple[int, bool]]:
    """Return step and whether there was a validation, for each checkpoint."""
    return [(save.snapshot.step, save.validation is not None) for save in cluster.saves]
