"""What a step says of its exchange: how long it took, and what backward did not hide."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.staging import assign, compute, started

pytestmark = pytest.mark.usefixtures("small_frames")


def committed(cluster: SimulatedCluster, seconds: float) -> tuple[float, float]:
    """Bring what was computed to the coordinator so late; return the two figures of the step."""
    cluster.now += seconds
    for worker in cluster.workers:
        if worker.present:
            cluster.deliver_up(worker)
    (step,) = cluster.named("step")
    assert step["seconds"] == seconds
    slowest = max(step["worker_seconds"], key=step["worker_seconds"].get)
    assert step["exchange_ms"] == pytest.approx(
        1e3 * step["worker_overlap_seconds"][slowest] + step["exchange_exposed_ms"]
    )
    return step["exchange_ms"], step["exchange_exposed_ms"]


def computing(problem: ExactProblem, *speeds: tuple[float, float]) -> SimulatedCluster:
    """Return a cluster that computed a step, by seconds a sample and the part that hides."""
    cluster = started(problem, len(speeds))
    assign(cluster)
    for worker, (seconds, overlap) in zip(cluster.workers, speeds, strict=True):
        worker.seconds_per_sample, worker.overlap = seconds, overlap
        compute(worker)
    return cluster


def test_it_begins_with_the_slowest_workers_first_gradient(problem: ExactProblem):
    """Its four samples take 2 s, of which the last half second follows its first gradient."""
    cluster = computing(problem, (0.125, 1.0), (0.5, 0.25))
    assert committed(cluster, 2.125) == (625.0, 125.0)


def test_without_gradients_during_backward_all_of_it_is_exposed(problem: ExactProblem):
    cluster = computing(problem, (0.5, 0.0), (0.125, 0.0))
    assert committed(cluster, 2.25) == (250.0, 250.0)


def test_clocks_that_differ_make_nothing_negative(problem: ExactProblem):
    """Each host counts its own seconds: the slowest may have counted more than the step took."""
    cluster = computing(problem, (0.5, 0.5), (0.125, 0.5))
    assert committed(cluster, 1.75) == (1000.0, 0.0)


def test_a_shard_that_was_dealt_again_counts_as_its_takers_computing(problem: ExactProblem):
    """Eight samples of 0.25 s: the one that is left takes four of its own and the other's."""
    cluster = started(problem, 2)
    left, lost = cluster.workers
    left.seconds_per_sample, left.overlap = 0.25, 0.5
    cluster.kill(lost)
    assign(cluster, left)
    compute(left)
    assert [event["ranks"] for event in cluster.named("reassigned")] == [[0]]
    assert committed(cluster, 2.5) == (1500.0, 500.0)
