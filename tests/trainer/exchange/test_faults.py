"""Faults at chosen moments; what holds at every moment is checked by the simulated cluster."""

from __future__ import annotations

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.simulated_worker import SimulatedWorker
from tests.trainer.exchange.staging import assign, compute, covered, open_round, redealt, started
from trainer.exchange.protocol.messages import ShardAssignment, ShardResult

pytestmark = pytest.mark.usefixtures("small_frames")


# A worker dies


def test_between_its_upload_and_the_broadcast(problem: ExactProblem):
    cluster = started(problem)
    assign(cluster)
    first, *others = cluster.workers
    compute(first)
    cluster.kill(first, delivered=None)
    assert redealt(cluster) == [], "everything it owed was here"
    for other in others:
        compute(other)
        cluster.deliver_up(other)
    assert cluster.step == 1
    assert [0, 0, 3] in cluster.named("step")[0]["sample_ranges"], "what the dead one did counts"
    cluster.run_to_end()


@pytest.mark.parametrize("blocks", range(4))
def test_in_the_middle_of_its_blocks(problem: ExactProblem, blocks: int):
    cluster = started(problem)
    assign(cluster)
    victim = cluster.workers[1]
    compute(victim, blocks)
    cluster.kill(victim, delivered=None)
    assert redealt(cluster) == [(1, [0, 2])]
    pieces = [s for s in open_round(cluster).ledger.list_open(0) if s.start >= 3]
    assignment = open_round(cluster).make_assignment(pieces[0])
    send_order = problem.layout.send_order
    if blocks:
        assert assignment.missing_blocks
        assert set(assignment.missing_blocks) == set(send_order[blocks:]), (
            "only what is missing again"
        )
    else:
        assert assignment.missing_blocks is None
    cluster.settle_down()
    assert cluster.named("step")[0]["step"] == 1
    cluster.run_to_end()


def test_after_all_blocks_but_before_its_result(problem: ExactProblem):
    cluster = started(problem)
    assign(cluster)
    victim = cluster.workers[2]
    compute(victim, len(problem.layout.blocks))
    cluster.kill(victim, delivered=None)
    assert redealt(cluster) == [(2, [0, 1])]
    piece = max(open_round(cluster).ledger.list_open(0), key=lambda shard: shard.id)
    assert open_round(cluster).make_assignment(piece).missing_blocks == (), (
        "only its loss is missing"
    )
    cluster.settle_down()
    cluster.run_to_end()


def test_at_every_byte_of_its_upload():
    problem = ExactProblem(training__epochs=1)
    cluster = started(problem)
    assign(cluster)
    compute(cluster.workers[0])
    assert cluster.workers[0].wire
    size = len(cluster.workers[0].wire.up.take(None))
    assert size > 500
    for cut in range(0, size + 1, 5):  # most of them within a block
        cluster = started(problem)
        assign(cluster)
        victim = cluster.workers[0]
        compute(victim)
        cluster.kill(victim, delivered=cut)
        sums = open_round(cluster).sums
        assert sums
        assert not sums.partial, "nothing unfinished is kept"
        cluster.settle_down()
        assert cluster.named("step")[0]["step"] == 1


def test_the_same_samples_are_lost_twice(problem: ExactProblem):
    cluster = started(problem, workers=4)
    assign(cluster)
    compute(cluster.workers[0], 1)
    cluster.kill(cluster.workers[0], delivered=None)
    second = cluster.workers[1]
    cluster.deliver_down(second)
    compute(second, 7)  # its own shard and two blocks of the one that was dealt again
    cluster.kill(second, delivered=None)
    assert redealt(cluster) == [(0, [1, 2]), (1, [2])]
    cluster.settle_down()
    shares = cluster.named("step")[0]["sample_ranges"]
    assert sorted(start for _, start, _ in shares) == [start for _, start, _ in shares]
    cluster.run_to_end()


def test_all_die_and_one_returns(problem: ExactProblem):
    cluster = started(problem)
    assign(cluster)
    compute(cluster.workers[0], 2)
    for worker in cluster.workers:
        cluster.kill(worker, delivered=None)
    assert covered(open_round(cluster).orphans) == set(range(8))
    cluster.pass_time(60)
    assert cluster.finish is None
    before = len(redealt(cluster))
    cluster.revive(cluster.workers[2])
    cluster.pass_time(TICK)
    cluster.settle_down()
    assert cluster.complete
    assert {rank for _, to in redealt(cluster)[before:] for rank in to} == {2}


def test_orphans_are_dealt_once_when_their_owner_comes_and_goes_before_it_is_ready(
    problem: ExactProblem,
):
    cluster = started(problem)
    assign(cluster)
    for worker in cluster.workers:
        cluster.kill(worker)
    owner = cluster.workers[2]  # the last to die: it had been dealt everything
    cluster.revive(owner)
    cluster.connect(owner)
    cluster.deliver_up(owner)  # let in, but it never proves its state
    assert len(cluster.machine.membership) == 1
    cluster.kill(owner)
    assert covered(open_round(cluster).orphans) == set(range(8))
    cluster.run_to_end()


def test_nobody_returns(problem: ExactProblem):
    cluster = started(problem)
    cluster.go_on(9)
    step = cluster.step
    for worker in cluster.workers:
        cluster.kill(worker)
    cluster.pass_time(problem.config.exchange.join_deadline + 1)
    assert cluster.end.exit_code == 3
    assert "no worker was left for 120 s" in cluster.end.reason
    assert step > 0
    assert cluster.saves[-1].snapshot.step == step
    cluster.run_to_end()


def test_a_power_cut_is_noticed_by_silence(problem: ExactProblem):
    cluster = started(problem)
    cluster.kill(cluster.workers[1], silent=True)
    lost_after = problem.config.exchange.lost_after
    cluster.pass_time(lost_after - 2 * TICK)
    assert not cluster.named("lost")
    cluster.pass_time(3 * TICK)
    assert cluster.named("lost")[0]["reason"] == "silent for 3 s"
    cluster.revive(cluster.workers[1])
    cluster.run_to_end()
    assert [event["rank"] for event in cluster.named("rejoined")] == [1]


# A worker stalls


def test_a_stopped_worker_is_fenced_off_and_rejoins(problem: ExactProblem):
    cluster = started(problem)
    assign(cluster)
    stopped = cluster.workers[1]
    compute(stopped, 3)
    stopped.stalled = True
    for worker in cluster.workers:
        if worker is not stopped:
            compute(worker)
            cluster.deliver_up(worker)
    generation = stopped.session.generation if stopped.session else 0
    cluster.pass_time(problem.config.exchange.lost_after + 2 * TICK)
    assert redealt(cluster) == [(1, [0, 2])]
    stopped.stalled = False
    while not cluster.finish:  # it goes on with its old shard, on its old connection
        cluster.go_on()
        cluster.pass_time(TICK)
    rejoined = cluster.named("rejoined")
    assert [event["rank"] for event in rejoined] == [1]
    assert rejoined[0]["generation"] > generation


# Late joiners


def test_a_late_joiner_gets_what_the_step_has_averaged(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=3, expect=2)
    late = cluster.workers[2]
    late.alive = False
    for worker in cluster.workers[:2]:
        cluster.connect(worker)
    for _ in range(2):
        for worker in cluster.workers[:2]:
            cluster.deliver_up(worker)
            cluster.deliver_down(worker)
    assign(cluster, *cluster.workers[:2])
    for worker in cluster.workers[:2]:
        compute(worker, 2)
        cluster.deliver_up(worker)
    sums = open_round(cluster).sums
    assert sums
    assert len(sums.averages) == 2
    cluster.revive(late)
    cluster.connect(late)
    cluster.settle_down()
    assert late.ended
    assert late.commits[0].commit.step == 0, "it joined in the middle of a step and applied it"
    assert len(late.commits) == problem.plan.total_steps
    shares = cluster.named("step")[1]["sample_ranges"]
    assert {rank for rank, *_ in shares} == {0, 1, 2}, "and computes from the next one on"


def test_a_joiner_past_the_first_step_gets_the_moments(problem: ExactProblem):
    cluster = started(problem, workers=2)
    while cluster.step < 3:
        cluster.go_on()
    late = SimulatedWorker(problem, 7)
    cluster.workers.append(late)
    cluster.connect(late)
    cluster.settle_down()
    assert late.state
    assert late.state.compute_digest() == cluster.machine.training.state.compute_digest()
    assert 0 < len(late.commits) < problem.plan.total_steps


# What a worker must not send


@pytest.mark.parametrize("table", [((1, 2),), ((1,) * 5,) * 4, ((1,) * 5, *((1,) * 4,) * 4), None])
def test_confusion_matrices_of_another_shape(
    problem: ExactProblem, table: tuple[tuple[int, ...], ...] | None
):
    cluster = started(problem)
    while open_round(cluster).kind == "train":
        cluster.go_on()
    liar = cluster.workers[0]
    shard = open_round(cluster).ledger.list_open(0)[0]
    result = ShardResult(
        shard=shard.id,
        loss_sum=1.0,
        weight=shard.size,
        tokens=1,
        compute_seconds=1,
        confusion=table,
    )
    liar.send(result)
    cluster.deliver_up(liar)
    assert cluster.named("lost")[0]["reason"] == "expected a confusion matrix of 5 classes"
    cluster.run_to_end()


def test_figures_of_a_task_without_pairs_or_a_script(problem: ExactProblem):
    cluster = started(problem)
    while open_round(cluster).kind == "train":
        cluster.go_on()
    liar = cluster.workers[0]
    shard = open_round(cluster).ledger.list_open(0)[0]
    result = ShardResult(
        shard=shard.id,
        loss_sum=1.0,
        weight=shard.size,
        tokens=1,
        compute_seconds=1,
        confusion=((1,) * 5,) * 5,
        figures={"reward_chosen": 1.0},
    )
    liar.send(result)
    cluster.deliver_up(liar)
    assert cluster.named("lost")[0]["reason"] == "unexpected figures of pairs or a script"
    cluster.run_to_end()


@pytest.mark.parametrize("weight", [6, 2**32 - 1])
def test_one_shard_has_one_weight(problem: ExactProblem, weight: int):
    cluster = started(problem)
    assign(cluster)
    liar = cluster.workers[1]
    send_blocks(cluster, liar, [(1, 5), (0, weight)])
    assert cluster.named("lost")[0]["reason"] == "shard 1: its blocks differ in weight"


def test_gradients_and_result_have_one_weight(problem: ExactProblem):
    cluster = started(problem)
    assign(cluster)
    liar = cluster.workers[1]
    shard = send_blocks(cluster, liar, [(index, 5) for index in problem.layout.send_order])
    result = ShardResult(shard=shard, loss_sum=1.0, weight=6, tokens=1, compute_seconds=1)
    liar.send(result)
    cluster.deliver_up(liar)
    assert cluster.named("lost")[0]["reason"] == "shard 1: result and gradients differ in weight"


def test_weights_beyond_the_header_break_no_broadcast(problem: ExactProblem):
    cluster = started(problem, workers=2)
    assign(cluster)
    for worker in cluster.workers:
        send_blocks(cluster, worker, [(1, 2**32 - 1)])
    for worker in cluster.workers:
        cluster.deliver_down(worker)
    assert not cluster.named("lost")


def send_blocks(
    cluster: SimulatedCluster, worker: SimulatedWorker, blocks: list[tuple[int, int]]
) -> int:
    """Send (block, weight) of the worker's first open shard and return the shard's number."""
    assert worker.session
    assert worker.rank is not None
    problem = cluster.problem
    shard = open_round(cluster).ledger.list_open(worker.rank)[0]
    assignment: ShardAssignment = open_round(cluster).make_assignment(shard)
    total = problem.shard_gradient(assignment.epoch, shard.start, shard.stop)
    for index, weight in blocks:
        span = problem.layout.blocks[index]
        part = total[span.start : span.stop]
        worker.post(*worker.session.make_block_frames(assignment, index, part, weight))
    cluster.deliver_up(worker)
    return shard.id
