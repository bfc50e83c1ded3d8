"""Which workers may join, which are refused or expelled, and with which reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem, join_request
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from trainer.exchange.coordinator.membership import RESUME_PATIENCE
from trainer.exchange.coordinator.pending_connections import JOIN_REQUEST_TIMEOUT
from trainer.exchange.protocol.messages import Heartbeat, StateLoaded
from trainer.exchange.protocol.wire import Frame, MessageType

pytestmark = pytest.mark.usefixtures("small_frames")


def candidate(cluster: SimulatedCluster, rank: int | None, **changes: Any) -> SimulatedWorker:
    """Add a worker that was not expected."""
    worker = SimulatedWorker(cluster.problem, rank, join_request(rank, **changes))
    cluster.workers.append(worker)
    return worker


def introduce(
    cluster: SimulatedCluster, worker: SimulatedWorker, certified: int | None = None
) -> None:
    cluster.connect(worker, certified)
    cluster.deliver_up(worker)
    cluster.deliver_down(worker)


# Admission


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("run_id", "run differs: the worker has other, the run run-1"),
        ("motley_version", "version of Motley differs: the worker has other"),
        ("config_digest", "config differs: the worker has other"),
        ("model_digest", "model or script differs: the worker has other"),
        ("layout_digest", "gradient layout differs: the worker has other"),
        ("data_digest", "data differs: the worker has other"),
    ],
)
def test_another_job_is_refused_for_good(problem: ExactProblem, field: str, said: str):
    cluster = SimulatedCluster(problem, workers=2)
    stranger = candidate(cluster, 1, **{field: "other"})
    introduce(cluster, stranger)
    assert stranger.refused
    assert said in stranger.refused
    assert cluster.named("refused")[0]["reason"] == stranger.refused
    assert not cluster.wires, "nothing stays open"
    cluster.run_to_end()


def test_a_taken_rank_is_refused_for_now(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    cluster.connect(cluster.workers[0])
    cluster.settle_down()
    double = candidate(cluster, 0, host="elsewhere")
    introduce(cluster, double)
    assert double.refused is None, "it may try again: the other may be dead without our knowing"
    assert "rank 0 has already joined, from host-0" in cluster.named("refused")[0]["reason"]
    assert double.session is None
    cluster.kill(cluster.workers[0])
    introduce(cluster, double)
    assert double.rank == 0


def test_a_host_name_of_any_length_breaks_no_refusal(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    first = candidate(cluster, 0, host="h" * 1000)
    introduce(cluster, first)
    double = candidate(cluster, 0)
    introduce(cluster, double)
    assert "rank 0 has already joined, from hhh" in cluster.named("refused")[0]["reason"]


@pytest.mark.parametrize(
    ("claimed", "certified", "rank"), [(None, 2, 2), (2, 2, 2), (None, None, 0), (5, None, 5)]
)
def test_the_rank_is_the_certificates(
    problem: ExactProblem, claimed: int | None, certified: int | None, rank: int
):
    cluster = SimulatedCluster(problem, workers=3)
    worker = candidate(cluster, claimed)
    introduce(cluster, worker, certified)
    assert worker.rank == rank


def test_a_certificate_of_another_rank_is_refused_for_good(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=3)
    worker = candidate(cluster, 1)
    introduce(cluster, worker, certified=0)
    assert worker.refused
    assert "the certificate is of rank 0, the worker claims rank 1" in worker.refused


def test_workers_without_a_rank_get_the_lowest_free_one(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=0, expect=3)
    for _ in range(3):
        introduce(cluster, candidate(cluster, None))
    assert [worker.rank for worker in cluster.workers] == [0, 1, 2]
    cluster.kill(cluster.workers[1])
    late = candidate(cluster, None)
    introduce(cluster, late)
    assert late.rank == 1


# Before and after the introduction


def test_a_silent_connection_is_closed(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    silent = cluster.workers[0]
    cluster.connect(silent)
    silent.stalled = True
    cluster.pass_time(JOIN_REQUEST_TIMEOUT - TICK)
    assert len(cluster.wires) == 1
    cluster.pass_time(10)
    assert not cluster.wires


@pytest.mark.parametrize(
    "frame",
    [
        Heartbeat().to_frame(0),
        StateLoaded(step=0, digest="x").to_frame(0),
        Frame(MessageType.GRADIENT, bytes(16)),
        Frame(MessageType.JOIN_REQUEST, b"{}"),
        Frame(MessageType.JOIN_REQUEST, b"x" * 60_000),
    ],
    ids=["heartbeat", "proof", "gradient", "empty request", "garbage"],
)
def test_nothing_counts_before_a_valid_request(problem: ExactProblem, frame: Frame):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    worker = cluster.workers[0]
    cluster.connect(worker)
    assert worker.wire
    worker.wire.up.drop_queued()
    worker.post(frame)
    cluster.deliver_up(worker)
    cluster.deliver_down(worker)
    assert not cluster.wires
    assert len(cluster.machine.membership) == 0


def test_a_second_request_on_the_same_link_ends_it(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    worker = cluster.workers[0]
    introduce(cluster, worker)
    worker.post(join_request(1).to_frame(0))
    cluster.deliver_up(worker)
    assert cluster.named("lost")
    assert len(cluster.machine.membership) == 0


def test_a_wrong_proof_of_the_state_is_not_believed(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=1)
    worker = cluster.workers[0]
    introduce(cluster, worker)
    assert worker.wire
    worker.wire.up.drop_queued()
    worker.send(StateLoaded(step=0, digest="other"))
    cluster.deliver_up(worker)
    assert "not the one it was sent" in cluster.named("lost")[0]["reason"]
    assert not cluster.named("joined")
    cluster.run_to_end()


# Waiting


def test_who_did_not_join_in_time_is_named(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=4)
    for rank in (1, 3):
        cluster.workers[rank].alive = False
    cluster.pass_time(problem.config.exchange.join_deadline - 1)
    assert cluster.finish is None
    cluster.pass_time(2)
    assert cluster.end.exit_code == 3
    assert "rank 1, 3 did not join within 120 s" in cluster.end.reason
    ends = [worker.ended for worker in cluster.workers]
    assert ends[0]
    assert ends[0].exit_code == 3


def test_a_worker_that_comes_and_goes_does_not_put_the_deadline_off(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=1, expect=2)
    flapping = cluster.workers[0]
    deadline = cluster.now + problem.config.exchange.join_deadline
    while cluster.finish is None:
        assert cluster.now < deadline + 30, "nobody ever gives up"
        cluster.connect(flapping)
        cluster.deliver_up(flapping)
        cluster.pass_time(20, flowing=False)
        cluster.drop(flapping)
    assert cluster.end.exit_code == 3


def test_a_resumed_run_goes_on_with_those_who_came_back(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=3)
    cluster.start()
    while not cluster.saves:
        cluster.pass_time(TICK)
    cluster.coordinator = None
    lost = cluster.workers[2]
    cluster.finish = None
    for worker in cluster.workers:
        cluster.revive(worker)
    lost.alive = False
    cluster.saves = cluster.saves[:1]
    cluster.start_coordinator()
    cluster.pass_time(RESUME_PATIENCE - 1)
    assert cluster.step == 2, "it waits for the third one a while"
    cluster.pass_time(3)
    cluster.settle_down()
    assert cluster.complete
    assert {
        rank for event in cluster.named("step")[-4:] for rank, *_ in event["sample_ranges"]
    } == {0, 1}


# Bad memory


def test_other_weights_expel_and_three_times_refuse_for_good():
    problem = ExactProblem(samples=200)
    cluster = SimulatedCluster(problem, workers=2)
    bad = cluster.workers[1]
    bad.corrupt = True
    while not bad.refused and not cluster.finish:
        cluster.go_on()
        cluster.pass_time(TICK)
    assert len(cluster.named("diverged")) == 3
    assert all(event["rank"] == 1 for event in cluster.named("diverged"))
    assert bad.refused
    assert "rank 1 computed other weights 3 times" in bad.refused
