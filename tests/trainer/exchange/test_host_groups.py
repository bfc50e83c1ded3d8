"""Workers of one host send one gradient, and whatever fails there, each sample counts once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from tests.trainer.exchange.staging import compute, open_round, redealt, started, until_step
from trainer.exchange.coordinator.outliers import FEWEST
from trainer.exchange.protocol.members import MEETING
from trainer.exchange.protocol.messages import BlockParts, CarriedBy, Part
from trainer.exchange.worker.session import Session

pytestmark = pytest.mark.usefixtures("small_frames")

CARRIER, CARRIED = 1, 2


def grouped(problem: ExactProblem) -> SimulatedCluster:
    """Return a cluster of three in a step whose assignments are here, and nothing is computed."""
    cluster = SimulatedCluster(problem, 3, together=(CARRIER, CARRIED))
    while cluster.machine.training.round is None:
        for worker in cluster.workers:
            cluster.connect(worker)
            cluster.deliver_up(worker)
            cluster.deliver_down(worker)
            cluster.host.talk(worker)
    assert open_groups(cluster) == [(CARRIER, CARRIED)]
    for worker in cluster.workers:
        cluster.deliver_down(worker)
        assert worker.step()  # Restored
    return cluster


def open_groups(cluster: SimulatedCluster) -> list[tuple[int, ...]]:
    """Return the ranks of each group that sends one gradient, its carrier first."""
    groups = {id(group): group for group in open_round(cluster).groups.values()}.values()
    return [
        (group.carrier.rank, *(s.rank for s in group.shards if s != group.carrier))
        for group in groups
    ]


def member(cluster: SimulatedCluster, rank: int) -> tuple[SimulatedWorker, Session]:
    worker = cluster.workers[rank]
    assert worker.session
    return worker, worker.session


def test_two_workers_of_a_host_send_what_one_would(problem: ExactProblem):
    cluster = SimulatedCluster(problem, 3, together=(CARRIER, CARRIED))
    cluster.run_to_end()
    assert cluster.named("carried") == [{"event": "carried", "rank": CARRIED, "by": CARRIER}]
    received = [event["exchange_bytes"] - 3 * 120 for event in cluster.named("step")]
    assert received == [2 * 120] * 6, "also in the first step: it waits until they have met"
    assert all(event["together"] == [[CARRIER, CARRIED]] for event in cluster.named("step"))
    assert not redealt(cluster)
    assert not cluster.named("lost")


def test_all_workers_on_one_host_and_any_carrier(problem: ExactProblem):
    cluster = SimulatedCluster(problem, 4, together=(3, 1, 0, 2))
    cluster.run_to_end()
    assert cluster.named("step")[-1]["exchange_bytes"] == (1 + 4) * 120


def test_a_member_dies_at_every_byte_that_it_hands_over():
    problem = ExactProblem(training__epochs=1)
    cluster = grouped(problem)
    compute(cluster.workers[CARRIED])
    wire = cluster.host.link_of(cluster.workers[CARRIED])
    size = len(wire.up.take(None))
    assert size > 500
    for cut in range(0, size + 1, 37):
        cluster = grouped(problem)
        step = cluster.step
        compute(cluster.workers[CARRIED])
        compute(cluster.workers[CARRIER])
        cluster.host.talk(cluster.workers[CARRIED], cut)
        cluster.kill(cluster.workers[CARRIED], delivered=None if cut % 2 else 0)
        assert not open_groups(cluster) or cut == size
        cluster.settle_down()
        assert cluster.step > step
        assert [event["rank"] for event in cluster.named("lost")] == [CARRIED]


def test_the_carrier_dies_at_every_byte_that_it_sends():
    problem = ExactProblem(training__epochs=1)

    def ready() -> SimulatedCluster:
        cluster = grouped(problem)
        for rank in (CARRIED, CARRIER):
            compute(cluster.workers[rank])
        cluster.host.talk(cluster.workers[CARRIED])
        return cluster

    carrier = ready().workers[CARRIER]
    assert carrier.wire
    size = len(carrier.wire.up.take(None))
    assert size > 500
    for cut in range(0, size + 1, 37):
        cluster = ready()
        step = cluster.step
        cluster.kill(cluster.workers[CARRIER], delivered=cut)
        cluster.settle_down()
        assert cluster.step > step
        assert [event["rank"] for event in cluster.named("lost")] == [CARRIER]
        assert cluster.workers[CARRIED].state


def test_a_member_that_sends_for_itself_again_and_a_carrier_that_returns(problem: ExactProblem):
    cluster = grouped(problem)
    cluster.kill(cluster.workers[CARRIER])
    cluster.settle_down()
    cluster.revive(cluster.workers[CARRIER])
    cluster.run_to_end()
    met = [(event["rank"], event["by"]) for event in cluster.named("carried")]
    assert met[:2] == [(CARRIED, CARRIER), (CARRIED, None)]


@pytest.mark.parametrize("blocks", range(5))
def test_the_link_between_them_breaks(problem: ExactProblem, blocks: int):
    """Nobody is lost: what was sent whole counts, the rest of the step goes without a group."""
    cluster = grouped(problem)
    step = cluster.step
    for rank in (CARRIED, CARRIER):
        compute(cluster.workers[rank], blocks)
    cluster.host.talk(cluster.workers[CARRIED])
    cluster.deliver_up(cluster.workers[CARRIER])
    cluster.host.cut(cluster.workers[CARRIED])
    cluster.settle_down()
    assert cluster.step > step
    assert bool(redealt(cluster)) == (blocks < 4)
    assert not cluster.named("lost")
    cluster.run_to_end()


def test_a_carrier_that_stops_is_lost_and_counts_nowhere_when_it_wakes(problem: ExactProblem):
    cluster = grouped(problem)
    step = cluster.step
    for rank in (CARRIED, CARRIER):
        compute(cluster.workers[rank])
    cluster.workers[CARRIER].stalled = True
    cluster.pass_time(problem.config.exchange.lost_after + 2 * TICK)
    cluster.settle_down()
    assert [event["rank"] for event in cluster.named("lost")] == [CARRIER]
    assert cluster.step > step
    cluster.workers[CARRIER].stalled = False
    cluster.run_to_end()


@pytest.mark.parametrize("late", [0, CARRIER, CARRIED])
def test_only_who_is_late_is_dropped(late: int):
    """A carrier without its member's part waits, as does a member for its carrier."""
    cluster = grouped(ExactProblem(exchange__join_deadline=20.0))
    for worker in cluster.workers:
        if worker.request.rank != late:
            compute(worker)
    while not cluster.named("lost"):
        cluster.pass_time(TICK)
    assert [event["rank"] for event in cluster.named("lost")] == [late]
    cluster.run_to_end()


def test_a_carrier_that_does_not_send_is_late_itself():
    cluster = grouped(ExactProblem(exchange__join_deadline=20.0))
    for worker in cluster.workers:
        compute(worker)
    cluster.host.talk = lambda *_: False  # type: ignore[method-assign] # nothing reaches it
    while not cluster.named("lost"):
        cluster.pass_time(TICK)
    assert [event["rank"] for event in cluster.named("lost")] == [CARRIER]


def test_a_run_does_not_wait_long_for_workers_that_do_not_meet(problem: ExactProblem):
    cluster = SimulatedCluster(problem, 3, together=(CARRIER, CARRIED))
    cluster.host.talk = lambda *_: False  # type: ignore[method-assign]
    cluster.start()
    assert cluster.machine.phase == "waiting"
    cluster.pass_time(MEETING)
    assert cluster.machine.phase == "waiting"
    cluster.pass_time(2 * TICK)
    assert cluster.machine.phase == "running"
    assert not open_groups(cluster)
    cluster.run_to_end()


# What is checked of each one's part


def wrong_on_purpose(cluster: SimulatedCluster) -> None:
    cluster.check = lambda: None  # type: ignore[method-assign]
    cluster.record = cluster.events.append  # type: ignore[method-assign]


@pytest.mark.parametrize("rank", [CARRIER, CARRIED])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_its_rank(
    problem: ExactProblem, rank: int, value: float
):
    cluster = grouped(problem)
    step = cluster.step
    cluster.workers[rank].poison = (1, 7, value)
    cluster.settle_down()
    assert cluster.end.exit_code == 5
    assert cluster.step == step
    for part in (f"step {step + 1}", f"rank {rank} ", "block layers.1", "tensor layers.1.v"):
        assert part in cluster.end.reason


def test_a_sum_that_overflows_names_all_who_are_in_it(problem: ExactProblem):
    cluster = grouped(problem)
    for rank in (CARRIER, CARRIED):
        cluster.workers[rank].poison = (1, 7, 3e38)
    cluster.settle_down()
    assert cluster.end.exit_code == 5
    assert "the sum of ranks 1, 2 sent inf in block layers.1" in cluster.end.reason


@pytest.mark.parametrize("rank", [CARRIER, CARRIED])
def test_an_outlier_is_named_by_its_rank(rank: int):
    problem = ExactProblem(samples=200, training__epochs=1, training__evaluate_every=0)
    cluster = SimulatedCluster(problem, 3, together=(CARRIER, CARRIED))
    until_step(cluster, FEWEST)
    wrong_on_purpose(cluster)
    assert not cluster.named("outlier")
    cluster.workers[rank].poison = (1, 3, 1e6)
    until_step(cluster, FEWEST + 2)
    event = cluster.named("outlier")[0]
    assert (event["rank"], event["block"], event["tensor"]) == (rank, "layers.1", "layers.1.q")


# What makes no sense


def _block(by: int) -> Callable[[SimulatedCluster], int]:
    """A member sends what its carrier is to send, or a carrier what it did not announce."""

    def send(cluster: SimulatedCluster) -> int:
        worker, session = member(cluster, by)
        shard = next(s for s in open_round(cluster).ledger.dealt if s.rank == by)
        given = open_round(cluster).assignment(shard)
        worker.post(*session.block(given, 0, np.zeros(10, np.float32), 3))
        return by

    return send


def _parts(
    count: int = 2, block: int = 0, tensor: int = 0, by: int = CARRIER
) -> Callable[[SimulatedCluster], int]:
    def send(cluster: SimulatedCluster) -> int:
        worker, _ = member(cluster, by)
        shard = next(s for s in open_round(cluster).ledger.dealt if s.rank == by)
        parts = (Part(weight=3, norm=1.0, tensor=tensor),) * count
        worker.send(BlockParts(shard=shard.id, block=block, parts=parts))
        return by

    return send


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        (_block(CARRIED), "which another rank carries"),
        (_block(CARRIER), "block 0 of a group came before its parts"),
        (_parts(count=3), "3 parts of 2 shards"),
        (_parts(block=4), "parts of block 4, which is not due"),
        (_parts(tensor=2), "tensor 2 of 2"),
        (_parts(by=CARRIED), "which carries no others"),
    ],
)
def test_it_ends_the_membership_and_the_run_goes_on(
    problem: ExactProblem, misbehave: Callable[[SimulatedCluster], int], reason: str
):
    cluster = grouped(problem)
    bad = misbehave(cluster)
    cluster.deliver_up(cluster.workers[bad])
    (lost,) = cluster.named("lost")
    assert lost["rank"] == bad
    assert reason in lost["reason"]
    cluster.run_to_end()


@pytest.mark.parametrize(("rank", "generation"), [(0, 99), (7, 1), (CARRIED, 0)])
def test_old_news_of_a_carrier_is_void(problem: ExactProblem, rank: int, generation: int):
    cluster = started(problem)
    worker, session = member(cluster, CARRIED)
    generation = generation or session.generation
    worker.send(CarriedBy(rank=rank, generation=generation))
    cluster.deliver_up(worker)
    assert cluster.named("carried")[-1]["by"] is None
