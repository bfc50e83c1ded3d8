"""Rounds through the simulated cluster: flush commits, early hand-ins, losses in between."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import SimulatedCluster
from tests.trainer.exchange.staging import (
    assign,
    compute,
    covered,
    open_round,
    started,
    until_step,
)
from trainer.exchange.protocol.messages import PartialShard, ShardAssignment

pytestmark = pytest.mark.usefixtures("small_frames")


def rounds(**settings: Any) -> ExactProblem:
    """Return two epochs of 24 samples: six rounds of two inner steps of four samples."""
    return ExactProblem(
        samples=24,
        training__batch_size=4,
        training__evaluate_every=0,
        exchange__schedule="rounds",
        exchange__inner_steps=2,
        **settings,
    )


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [1, 3])
def test_everyone_holds_the_outer_update_and_the_settled_moments(codec: str, workers: int):
    """The cluster checks both after every commit; here: there were such, and in between others."""
    problem = rounds(exchange__codec=codec)
    cluster = SimulatedCluster(problem, workers)
    cluster.run_to_end()
    assert [event["step"] for event in cluster.named("step")] == [1, 2, 3, 4, 5, 6]
    assert [save.snapshot.step for save in cluster.saves] == [2, 4, 6]
    changed = [problem.second_moments[k] != problem.second_moments[k + 1] for k in range(6)]
    assert changed == [problem.plan.flushes_residuals(step) for step in range(6)]
    assert changed == [False, True] * 3
    # Adam's second moment of the coordinator is not that of the pseudo-gradients.
    assert any(worker.commits[0].gradient.size == problem.layout.size for worker in cluster.workers)
    assert all(
        worker.commits[1].gradient.size == 2 * problem.layout.size for worker in cluster.workers
    )


def test_a_round_is_dealt_in_inner_steps_of_one_size():
    cluster = started(rounds(), workers=2)
    assign(cluster)
    (_, shard), *_ = cluster.workers[0].events
    assert isinstance(shard, ShardAssignment)
    assert (shard.stop - shard.start, shard.inner_batch_size) == (4, 2)
    assert shard.time_limit is None, "nothing is known of the workers' speed yet"


def test_a_limit_follows_from_measured_speeds_and_not_where_the_split_is_fixed():
    cluster = SimulatedCluster(rounds(exchange__split="measured"), workers=2)
    until_step(cluster, 1)
    limit = open_round(cluster).time_limit
    assert limit
    assert limit >= 1.5 * 4 * 0.01
    fixed = SimulatedCluster(rounds(), workers=2)
    until_step(fixed, 1)
    assert open_round(fixed).time_limit is None
    alone = SimulatedCluster(rounds(exchange__split="measured"), workers=1)
    until_step(alone, 1)
    assert open_round(alone).time_limit is None, "no other worker could take the rest"


def test_the_rest_of_a_shard_that_is_handed_in_early_goes_to_the_others():
    cluster = SimulatedCluster(rounds(), workers=3)
    cluster.workers[1].hands_in_early = True
    cluster.run_to_end()
    early = cluster.named("reassigned")
    assert early
    assert all(event["rank"] == 1 and 1 not in event["ranks"] for event in early)
    assert all(event["completed_samples"] > 0 for event in early)
    takers = {rank for event in cluster.named("step") for rank, *_ in event["sample_ranges"]}
    assert takers == {0, 1, 2}
    speed = cluster.machine.training.assigner.balancer.speeds[1]
    assert speed.per_sample == pytest.approx(0.01), "what it did of its shard says how fast it is"


def test_a_worker_alone_gets_the_rest_of_what_it_handed_in():
    cluster = SimulatedCluster(rounds(), workers=1)
    cluster.workers[0].hands_in_early = True
    cluster.run_to_end()
    assert {tuple(event["ranks"]) for event in cluster.named("reassigned")} == {(0,)}


def test_a_worker_that_dies_after_it_handed_in_loses_only_its_part():
    cluster = started(rounds())
    worker = cluster.workers[1]
    worker.hands_in_early = True
    assign(cluster)
    compute(worker, blocks=1)
    cluster.deliver_up(worker)
    task = open_round(cluster)
    assert [event["samples"] for event in cluster.named("reassigned")] == [2]
    cluster.kill(worker)
    assert [event["samples"] for event in cluster.named("reassigned")] == [2, 1]
    assert covered(task.ledger.list_open(0) + task.ledger.list_open(2)) == set(range(8))
    cluster.run_to_end()


@pytest.mark.parametrize("samples", [0, 3, 99])
def test_a_shard_is_not_cut_where_it_cannot_be(samples: int):
    cluster = started(rounds())
    worker = cluster.workers[1]
    assign(cluster)
    shard = next(s for s in open_round(cluster).ledger.initial_shards if s.rank == 1)
    assert shard.size == 3
    worker.send(PartialShard(shard=shard.id, samples=samples))
    cluster.deliver_up(worker)
    (lost,) = cluster.named("lost")
    assert f"{samples} samples of shard {shard.id} handed in" in lost["reason"]
    cluster.run_to_end()


def test_nothing_is_handed_in_early_once_a_block_is_here_or_in_an_ordinary_step():
    for problem in (rounds(), ExactProblem()):
        cluster = started(problem)
        worker = cluster.workers[1]
        assign(cluster)
        if problem.config.exchange.rounds:
            compute(worker, blocks=2)
        shard = next(s for s in open_round(cluster).ledger.initial_shards if s.rank == 1)
        worker.send(PartialShard(shard=shard.id, samples=1))
        cluster.deliver_up(worker)
        assert [event["rank"] for event in cluster.named("lost")] == [1]
        cluster.run_to_end()


@pytest.mark.parametrize("step", range(6))
def test_a_coordinator_that_dies_goes_on_from_a_settled_commit(step: int):
    problem = rounds()
    cluster = SimulatedCluster(problem, workers=3)
    until_step(cluster, step)
    cluster.kill_coordinator(delivered=50)
    cluster.start_coordinator()
    assert cluster.step % 2 == 0
    cluster.run_to_end()


def test_a_joiner_between_settled_commits_gets_the_last_settled_moments():
    problem = rounds()
    cluster = SimulatedCluster(problem, workers=3, expect=2)
    cluster.workers[2].alive = False
    until_step(cluster, 3)
    cluster.revive(cluster.workers[2])
    cluster.connect(cluster.workers[2])
    while cluster.workers[2].state is None:
        cluster.go_on()
    assert cluster.workers[2].state.step >= 3  # the cluster compares its moments
    cluster.run_to_end()


# From steps to rounds in the middle of a run


def changing(**settings: Any) -> ExactProblem:
    """Return three steps of four samples, then a round of two, one of one, and three of two."""
    return ExactProblem(
        samples=20,
        training__batch_size=4,
        training__evaluate_every=0,
        exchange__schedule="rounds",
        exchange__inner_steps=2,
        exchange__rounds_after=3,
        **settings,
    )


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_everyone_goes_from_steps_to_rounds_at_once(codec: str):
    problem = changing(exchange__codec=codec)
    cluster = SimulatedCluster(problem, workers=3)
    cluster.run_to_end()
    sizes = [commit.gradient.size for commit in cluster.workers[0].commits]
    once, twice = problem.layout.size, 2 * problem.layout.size
    assert sizes == [once, once, once, twice, once, twice, twice]
    assert [len(problem.plan.find_inner_steps(step)) for step in range(7)] == [1, 1, 1, 2, 2, 2, 1]
    assert [save.snapshot.step for save in cluster.saves] == [2, 3, 4, 6, 7]


@pytest.mark.parametrize("step", range(7))
def test_a_coordinator_that_dies_resumes_on_its_side_of_the_change(step: int):
    """At step 3 from the checkpoint between, which holds AdamW's first moment."""
    cluster = SimulatedCluster(changing(), workers=3)
    until_step(cluster, step)
    cluster.kill_coordinator(delivered=50)
    cluster.start_coordinator()
    assert cluster.step == {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 4, 6: 6}[step]
    cluster.run_to_end()


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("delivered", [0, 300, None])
def test_a_worker_that_dies_at_the_change_comes_back(step: int, delivered: int | None):
    cluster = SimulatedCluster(changing(), workers=3)
    until_step(cluster, step)
    worker = cluster.workers[1]
    cluster.go_on()
    cluster.kill(worker, delivered)
    cluster.go_on(3)
    cluster.revive(worker)
    cluster.connect(worker)
    cluster.run_to_end()


def test_rounds_are_not_compared_with_the_gradients_before_them():
    """They have other sizes: each would be an outlier, and could halt the run."""
    cluster = SimulatedCluster(changing(), workers=3)
    until_step(cluster, 2)
    outliers = cluster.machine.training._outliers
    assert all(usual.by_weight for usual in outliers._usual)
    until_step(cluster, 3)
    assert not any(usual.by_weight or usual.by_root for usual in outliers._usual)


def test_a_round_that_follows_steps_has_more_time_than_they_took():
    """Three times a step's p95 would expel everyone who takes part in the first round."""
    cluster = SimulatedCluster(changing(), workers=2)
    until_step(cluster, 3)
    task = open_round(cluster)
    patience = cluster.problem.config.exchange.join_deadline
    assert task.inner_batch_size
    assert task.deadline - task.started == 2 * patience
