"""A worker that does not prove its weights: thrown out, named, and no success (F-DP-001)."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.staging import until_step
from trainer.exchange.coordinator.membership import STOP_PATIENCE
from trainer.system.errors import UnprovedError

pytestmark = pytest.mark.usefixtures("small_frames")

NOT_PROVED = UnprovedError.exit_code


@pytest.fixture(scope="module")
def problem() -> ExactProblem:
    return ExactProblem(validation_samples=0)


def at_the_end(problem: ExactProblem, workers: int = 2) -> SimulatedCluster:
    """Return a cluster whose last worker has kept its last proof to itself."""
    cluster = SimulatedCluster(problem, workers)
    until_step(cluster, problem.plan.total_steps - 1)
    cluster.workers[-1].mute = True
    cluster.settle_down()
    assert cluster.complete, "the checkpoint does not wait"
    assert cluster.finish is None
    return cluster


def test_a_worker_that_never_reports_is_thrown_out():
    problem = ExactProblem(samples=400, training__evaluate_every=0, exchange__hash_every=1)
    cluster = SimulatedCluster(problem, workers=3)
    cluster.workers[2].mute = True
    until_step(cluster, 1)
    began, asked = cluster.now, cluster.step
    while not cluster.named("lost"):
        assert cluster.now < began + 60, "it may stay for ever"
        assert not cluster.named("verified"), "one proof is missing"
        cluster.go_on()
        cluster.pass_time(TICK)
    (lost,) = cluster.named("lost")
    assert lost["rank"] == 2
    assert lost["reason"] == f"it did not prove its weights after step {asked} in time"
    cluster.workers[2].alive = False  # nobody starts it again
    until_step(cluster, cluster.step + 2)
    assert cluster.named("verified")[-1]["ranks"] == [0, 1]
    cluster.run_to_end()


def test_the_last_proof_of_one_worker_is_missing(problem: ExactProblem):
    cluster = at_the_end(problem)
    cluster.pass_time(60)
    steps = problem.plan.total_steps
    missing = f"rank 1 did not prove that it holds the state after step {steps}"
    assert [event["rank"] for event in cluster.named("lost")] == [1]
    assert [event["reason"] for event in cluster.named("unverified")] == [missing]
    assert cluster.end.exit_code == NOT_PROVED
    assert missing in cluster.end.reason
    assert cluster.workers[0].ended
    assert cluster.workers[0].ended.exit_code == NOT_PROVED, "so that it is started again too"


@pytest.mark.parametrize("workers", [1, 3])
def test_started_again_it_ends_well_once_workers_prove_the_state_by_joining(
    problem: ExactProblem, workers: int
):
    cluster = at_the_end(problem, workers)
    cluster.pass_time(60)
    assert cluster.end.exit_code == NOT_PROVED
    cluster.run_to_end()
    assert cluster.end.exit_code == 0
    assert len(cluster.named("step")) == problem.plan.total_steps


def test_all_workers_die_before_their_last_proof(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    for worker in cluster.workers:
        worker.mute = True
    cluster.start()
    assert cluster.complete
    for worker in cluster.workers:
        cluster.kill(worker)
    cluster.pass_time(TICK)
    assert cluster.end.exit_code == NOT_PROVED
    assert "no worker proved" in cluster.end.reason
    assert not cluster.named("verified")
    cluster.run_to_end()


def test_one_dies_before_its_last_proof_and_the_others_prove_it(problem: ExactProblem):
    cluster = at_the_end(problem)
    cluster.kill(cluster.workers[1])
    cluster.pass_time(TICK)
    assert (cluster.end.exit_code, cluster.end.reason) == (0, "done")
    assert cluster.named("verified")[-1]["ranks"] == [0]


def test_wrong_weights_after_the_last_step_are_no_success(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    until_step(cluster, problem.plan.total_steps - 1)
    cluster.workers[1].corrupt = True
    cluster.settle_down()
    cluster.pass_time(TICK)
    assert cluster.named("diverged")[-1]["rank"] == 1
    assert cluster.end.exit_code == NOT_PROVED


def test_a_stopped_run_says_what_is_not_proved(problem: ExactProblem):
    """It is no error: whoever goes on takes the state that was saved."""
    cluster = SimulatedCluster(problem, workers=2)
    until_step(cluster, 2)
    cluster.workers[1].mute = True
    cluster.stop()
    cluster.settle_down()
    cluster.pass_time(STOP_PATIENCE + 2 * TICK)
    assert (cluster.end.exit_code, cluster.end.reason) == (0, "stopped by SIGTERM")
    missing = "rank 1 did not prove that it holds the state after step 3"
    assert [(event["at_step"], event["reason"]) for event in cluster.named("unverified")] == [
        (3, missing)
    ]
    cluster.run_to_end()


def test_a_joiner_does_not_keep_the_others_proof_open():
    """It has proved the state that it took; older questions are not put to it."""
    problem = ExactProblem(validation_samples=0, exchange__hash_every=3)
    cluster = SimulatedCluster(problem, workers=3, expect=2)
    late = cluster.workers[2]
    late.alive = False
    until_step(cluster, 2)
    cluster.workers[1].mute = True
    until_step(cluster, 3)
    late.alive = True
    cluster.connect(late)
    cluster.deliver_up(late)
    cluster.deliver_down(late)
    cluster.deliver_up(late)
    assert cluster.named("joined")[-1]["rank"] == 2
    cluster.kill(cluster.workers[1])
    cluster.go_on()
    assert [(event["at_step"], event["ranks"][0]) for event in cluster.named("verified")] == [
        (3, 0)
    ]


def test_its_own_sleep_is_no_missing_proof(problem: ExactProblem):
    cluster = at_the_end(problem)
    cluster.now += 3600
    cluster.tick()
    assert cluster.finish is None
    assert not cluster.named("lost")
