"""Who is late, how long a step may take, and a coordinator that slept itself."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.staging import assign, compute, open_round, started
from trainer.exchange.protocol.messages import Heartbeat

pytestmark = pytest.mark.usefixtures("small_frames")


@pytest.fixture(scope="module")
def long_problem() -> ExactProblem:
    """Return a problem of 50 steps without validations between."""
    return ExactProblem(samples=200, training__evaluate_every=0)


# Deadlines of a step


def test_only_the_late_worker_is_dropped(problem: ExactProblem):
    cluster = started(ExactProblem(exchange__join_deadline=20.0))
    assign(cluster)
    punctual, late, _ = cluster.workers
    for worker in (cluster.workers[0], cluster.workers[2]):
        compute(worker)
    cluster.pass_time(20 - TICK)  # beats come, gradients of the late one do not
    assert not cluster.named("lost")
    cluster.pass_time(3 * TICK)
    assert [event["rank"] for event in cluster.named("lost")] == [1]
    assert "missed the step's deadline" in cluster.named("lost")[0]["reason"]
    assert punctual.rank == 0
    assert late.rank is None
    cluster.run_to_end()


def test_workers_that_became_slow_for_good_still_finish(long_problem: ExactProblem):
    """F-DP-006: a deadline that everyone misses has to move."""
    cluster = started(long_problem, workers=1)
    worker = cluster.workers[0]
    while cluster.step < 5:
        cluster.go_on()
        cluster.pass_time(TICK)
    step, limit = cluster.step, cluster.now + 300
    while cluster.step < step + 3:
        assert cluster.now < limit, "it is thrown out again and again before it is done"
        cluster.connect(worker)
        cluster.pass_time(9.0)  # longer for one block than a whole step may take
        worker.step()
    assert cluster.named("lost")
    cluster.run_to_end()


def test_a_step_has_the_time_for_what_was_dealt_again(long_problem: ExactProblem):
    """Whoever is left alone with everyone's samples gets the time for all of them."""
    cluster = started(long_problem, workers=4)
    training = cluster.machine.training
    for rank in range(4):
        for _ in range(2):
            training.assigner.balancer.observe_shard(rank, 2, compute=20.0, elapsed=20.0)
    training.assigner.durations.record_duration("train", 20.0)
    for worker in cluster.workers[1:]:
        cluster.kill(worker)
    assert open_round(cluster).deadline >= cluster.now + 3 * 80.0


def test_a_redeal_never_shortens_the_deadline(long_problem: ExactProblem):
    cluster = started(long_problem, workers=3)
    before = open_round(cluster).deadline
    cluster.machine.training.assigner.durations.record_duration("train", 0.1)
    cluster.kill(cluster.workers[2])
    assert open_round(cluster).deadline >= before


def test_waiting_behind_ones_own_shard_is_no_overhead():
    cluster = started(ExactProblem(exchange__split="measured"))
    assign(cluster)
    compute(cluster.workers[0])
    cluster.kill(cluster.workers[1])
    cluster.pass_time(2.0)
    cluster.go_on(12)
    speeds = cluster.machine.training.assigner.balancer.speeds
    assert all(speed.overhead < 1e-6 for speed in speeds.values())


# The coordinator sleeps


def test_its_own_sleep_is_not_counted_as_silence(problem: ExactProblem):
    cluster = started(problem)
    cluster.now += 3600
    cluster.tick()
    assert not cluster.named("lost")
    cluster.run_to_end()


def test_its_own_sleep_does_not_extend_the_allowed_silence(problem: ExactProblem):
    cluster = started(problem)
    cluster.now += 3600
    for worker in cluster.workers:  # awake again, it reads before its timer runs
        worker.heard = cluster.now
        worker.send(Heartbeat())
        cluster.deliver_up(worker)
    cluster.tick()
    cluster.kill(cluster.workers[0], silent=True)
    cluster.pass_time(problem.config.exchange.lost_after + 2 * TICK)
    assert [event["rank"] for event in cluster.named("lost")] == [0]


def test_its_own_sleep_moves_a_deadline_only_by_what_the_step_missed(problem: ExactProblem):
    cluster = started(problem)
    cluster.now += 3600
    task = open_round(cluster)
    task.started, task.deadline = cluster.now - 2, cluster.now + 5  # begun after waking up
    cluster.tick()
    assert task.deadline == cluster.now + 7


def test_its_own_sleep_does_not_cut_an_introduction_short(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    worker = cluster.workers[0]
    cluster.connect(worker)
    cluster.now += 3600
    cluster.tick()
    worker.heard = cluster.now
    cluster.pass_time(1.0)
    assert worker.rank == 0


def test_its_own_sleep_does_not_use_up_the_join_deadline(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    cluster.workers[1].alive = False
    cluster.pass_time(1)
    assert cluster.machine.phase == "waiting"
    cluster.now += 3600
    cluster.tick()
    assert cluster.finish is None
    cluster.run_to_end()
