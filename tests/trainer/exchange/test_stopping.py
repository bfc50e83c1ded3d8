"""How a run is stopped: the last commit is saved at once, then the step under way may end."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.staging import saved, until_step, until_validating
from trainer.exchange.coordinator.membership import STOP_PATIENCE

pytestmark = pytest.mark.usefixtures("small_frames")


# What is under way


def test_stopped_while_waiting(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    cluster.start()
    cluster.stop("stopped by SIGTERM")
    cluster.pass_time(2 * TICK)
    assert (cluster.end.exit_code, cluster.end.reason) == (0, "stopped by SIGTERM")
    assert cluster.saves == [], "there is nothing to save yet"
    assert cluster.workers[0].ended


@pytest.mark.parametrize("pieces", range(1, 12))
def test_stopped_in_a_step_finishes_it_and_saves(problem: ExactProblem, pieces: int):
    cluster = SimulatedCluster(problem, workers=3)
    until_step(cluster, 1)
    cluster.go_on(pieces)
    task = cluster.machine.training.task
    training = task is not None and task.kind == "train"
    step = cluster.step
    cluster.stop()
    cluster.settle_down()
    cluster.pass_time(2 * TICK)
    assert cluster.end.exit_code == 0
    assert cluster.step == step + training
    assert cluster.saves[-1].snapshot.step == cluster.step
    assert all(worker.ended and worker.ended.exit_code == 0 for worker in cluster.workers)
    cluster.run_to_end()


def test_stopped_while_validating_drops_only_the_validation(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    until_validating(cluster)
    # A proof of the weights is still out, so the end is not at once.
    for worker in cluster.workers:
        cluster.deliver_down(worker)
    cluster.stop()
    for worker in cluster.workers:
        while worker.step():
            pass
        cluster.deliver_up(worker)
    cluster.pass_time(2 * TICK)
    assert not cluster.named("lost")
    assert not cluster.named("validation")
    assert cluster.end.exit_code == 0
    assert saved(cluster)[-1] == (4, False)
    cluster.run_to_end()


def test_stopped_together_with_its_workers(problem: ExactProblem):
    """`down` stops everyone at once; a step that all have left is not waited for."""
    cluster = SimulatedCluster(problem, workers=3)
    until_step(cluster, 3)
    step = cluster.step
    cluster.stop()
    for worker in cluster.workers:
        cluster.kill(worker)
    cluster.pass_time(2 * TICK)
    assert cluster.end.exit_code == 0
    assert cluster.saves[-1].snapshot.step == step
    cluster.run_to_end()


def test_stopped_without_workers(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    until_step(cluster, 3)
    for worker in cluster.workers:
        cluster.kill(worker)
    cluster.stop()
    cluster.pass_time(2 * TICK)
    assert cluster.end.exit_code == 0
    assert cluster.saves[-1].snapshot.step == 3


# A step that takes longer than a stop waits


@pytest.mark.parametrize("pieces", range(1, 12))
def test_the_last_commit_is_saved_before_anything_else_happens(problem: ExactProblem, pieces: int):
    cluster = SimulatedCluster(problem, workers=3)
    until_step(cluster, 1)
    cluster.go_on(pieces)
    cluster.stop()
    assert cluster.saves[-1].snapshot.step == cluster.step
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.run_to_end()


def test_a_step_that_is_not_done_in_time_is_left_out():
    problem = ExactProblem(
        checkpoint__every=100, training__evaluate_every=0, exchange__step_deadline=60.0
    )
    cluster = SimulatedCluster(problem, workers=2)
    until_step(cluster, 3)
    cluster.stop()
    assert saved(cluster) == [(3, False)]
    cluster.pass_time(STOP_PATIENCE - TICK)  # beats go to and fro, and no gradient comes
    assert cluster.finish is None
    cluster.pass_time(3 * TICK)
    assert cluster.end.exit_code == 0
    said = "step 4 was not finished in time and is skipped"
    assert cluster.end.reason == f"stopped by SIGTERM; {said}"
    assert saved(cluster) == [(3, False)]
    cluster.run_to_end()
    assert [event["step"] for event in cluster.named("step")] == [1, 2, 3, 4, 5, 6]


def test_a_step_that_is_done_in_time_is_saved_too():
    problem = ExactProblem(checkpoint__every=100, training__evaluate_every=0)
    cluster = SimulatedCluster(problem, workers=2)
    until_step(cluster, 3)
    cluster.stop()
    cluster.pass_time(STOP_PATIENCE / 2)
    cluster.settle_down()
    assert cluster.end.reason == "stopped by SIGTERM"
    assert saved(cluster) == [(3, False), (4, False)]
    assert cluster.named("verified")[-1]["at_step"] == 4, (
        "the last step of a stopped run is proved too"
    )
    cluster.run_to_end()
