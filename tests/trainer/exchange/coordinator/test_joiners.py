"""A state that takes many times `lost_after` to arrive: the joiner stays, and the run goes on."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from tests.trainer.exchange.staging import started
from trainer.exchange.coordinator.joiners import PREFETCH_STEPS
from trainer.exchange.protocol.state_transfer import StateDelivery
from trainer.exchange.protocol.wire import HEADER_SIZE
from trainer.optimizer.adamw import TrainState

pytestmark = pytest.mark.usefixtures("small_frames")

LOST_AFTER = 3.0
PATIENCE = 120.0


@pytest.fixture(scope="module")
def problem() -> ExactProblem:
    """Return a problem of 50 steps without validations between."""
    return ExactProblem(samples=200, training__evaluate_every=0)


def with_joiner(problem: ExactProblem) -> tuple[SimulatedCluster, SimulatedWorker]:
    """Return a cluster in which two work, and a third that just asked to join."""
    cluster = started(problem, workers=2)
    while cluster.step < 2:
        cluster.go_on()
    joiner = SimulatedWorker(problem, 2)
    cluster.workers.append(joiner)
    cluster.connect(joiner)
    cluster.deliver_up(joiner)
    return cluster, joiner


def crawl(
    cluster: SimulatedCluster, joiner: SimulatedWorker, seconds: float, down: int, work: bool = True
) -> None:
    """Let time pass while `down` bytes a tick reach the joiner, and all others flow."""
    assert cluster.finish is None
    end = cluster.now + seconds
    while cluster.now < end and cluster.finish is None:
        cluster.pass_time(TICK, flowing=False)
        for worker in cluster.workers:
            cluster.deliver_up(worker)
            cluster.deliver_down(worker, down if worker is joiner else None)
            if worker.present and (work or worker is joiner):
                worker.step()


def test_nobody_is_lost_while_a_state_arrives(problem: ExactProblem):
    cluster, joiner = with_joiner(problem)
    at = cluster.step
    crawl(cluster, joiner, 20 * LOST_AFTER, down=2)
    assert not cluster.named("lost")
    assert joiner.state is None, "its state is still on the way"
    told = cluster.named("lagging")
    assert 1 <= len(told) <= 2, "once, and perhaps before that while it was let in"
    assert {event["rank"] for event in told} == {2}
    assert "waits until it has caught up" in told[0]["reason"]
    assert cluster.step == at + PREFETCH_STEPS, (
        "training went on, until each step more would cost time"
    )
    cluster.run_to_end()
    assert not cluster.named("lost")
    assert [event["rank"] for event in cluster.named("joined")] == [0, 1, 2]
    assert len(joiner.commits) == problem.plan.total_steps - at


def test_the_run_does_not_wait_for_a_joiner_that_keeps_up(problem: ExactProblem):
    cluster, joiner = with_joiner(problem)
    at = cluster.step
    while len(cluster.named("joined")) < 3:
        crawl(cluster, joiner, 1.0, down=100)
        assert cluster.now < 1100, "it never catches up"
    assert cluster.step > at
    assert not cluster.named("lost")
    crawl(cluster, joiner, 3.0, down=400)
    assert {rank for rank, *_ in cluster.named("step")[-1]["sample_ranges"]} == {0, 1, 2}


def test_the_run_waits_for_what_a_joiner_lacks_before_it_counts_on_it(problem: ExactProblem):
    """Its first share is not due while the averages of earlier steps are still on their way."""
    cluster, joiner = with_joiner(problem)
    while joiner.state is None:
        crawl(cluster, joiner, TICK, down=12)
    behind = cluster.step - joiner.state.step
    assert behind > 1
    while len(cluster.named("joined")) < 3:
        crawl(cluster, joiner, TICK, down=12)
        assert cluster.step - joiner.state.step <= behind + 1
    assert cluster.step - joiner.state.step <= 1
    crawl(cluster, joiner, 20.0, down=400)
    assert not cluster.named("lost"), "what it proved while it caught up is not asked of it again"


def test_a_joiner_that_never_catches_up_is_barred(problem: ExactProblem):
    cluster, joiner = with_joiner(problem)
    crawl(cluster, joiner, 2 * PATIENCE, down=1)
    (lost,) = cluster.named("lost")
    assert lost["rank"] == 2
    assert "still behind after the run waited for it for 120 s" in lost["reason"]
    joiner.clear()
    cluster.connect(joiner)
    cluster.deliver_up(joiner)
    cluster.deliver_down(joiner)
    assert joiner.refused
    assert "exchange.join_deadline" in joiner.refused
    cluster.workers.remove(joiner)
    cluster.run_to_end()


def test_a_stop_does_not_wait_for_a_joiner(problem: ExactProblem):
    cluster, joiner = with_joiner(problem)
    crawl(cluster, joiner, 20 * LOST_AFTER, down=2)
    at = cluster.step
    cluster.stop()
    crawl(cluster, joiner, 2 * LOST_AFTER, down=2)
    assert cluster.end.exit_code == 0
    assert cluster.saves[-1].snapshot.step == at + 1


def test_a_joiner_that_stalls_is_lost_and_the_run_goes_on(problem: ExactProblem):
    cluster, joiner = with_joiner(problem)
    crawl(cluster, joiner, 20 * LOST_AFTER, down=2)
    at = cluster.step
    joiner.stalled = True
    crawl(cluster, joiner, LOST_AFTER + 1, down=0)
    assert [event["rank"] for event in cluster.named("lost")] == [2]
    assert cluster.step > at
    cluster.run_to_end()


def test_a_resumed_run_is_patient_with_a_state_on_its_way(problem: ExactProblem):
    """The states of all workers share one line: together they may need longer than a join may."""
    cluster = started(problem, workers=1)
    while not cluster.saves:
        cluster.go_on()
    (worker,) = cluster.workers
    cluster.kill_coordinator()
    cluster.kill(worker)
    cluster.revive(worker)
    cluster.start_coordinator()
    cluster.connect(worker)
    crawl(cluster, worker, PATIENCE + 30, down=1)
    assert worker.state is None
    assert cluster.finish is None
    assert not cluster.named("lost")
    cluster.run_to_end()


def test_part_of_a_frame_is_a_sign_of_life(problem: ExactProblem):
    cluster = started(problem, workers=1)
    (worker,) = cluster.workers
    cluster.deliver_down(worker)
    worker.step()  # the state
    worker.step()  # the first block: its frames wait in the worker's queue
    began = cluster.now
    for _ in range(HEADER_SIZE - 2):
        cluster.deliver_up(worker, 1)
        cluster.now += TICK
        cluster.tick()
    assert cluster.now - began > 2 * LOST_AFTER
    assert not cluster.named("lost")
    cluster.run_to_end()


def test_no_state_is_hashed_at_once(problem: ExactProblem, monkeypatch: pytest.MonkeyPatch):
    """2.3 GB/s of hashing on the event loop silences the coordinator, for a refused rank too."""
    monkeypatch.setattr(
        TrainState, "compute_digest", lambda _: pytest.fail("a whole state was hashed")
    )
    hashed: list[int] = []
    state = StateDelivery.make_state_frames
    monkeypatch.setattr(
        StateDelivery, "make_state_frames", lambda *words: hashed.append(1) or state(*words)
    )
    cluster = started(problem, workers=2)
    assert len(hashed) == 2
    double = SimulatedWorker(problem, 0)
    cluster.workers.append(double)
    for _ in range(3):
        cluster.connect(double)
        cluster.deliver_up(double)
        cluster.deliver_down(double)
    assert len(cluster.named("refused")) == 3
    assert len(hashed) == 2
