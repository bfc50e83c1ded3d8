"""From the first step to the last: checkpoints, validations, restarting, same bits."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from tests.trainer.exchange.staging import saved, until_step
from trainer.exchange.protocol.messages import Shutdown
from trainer.optimizer.adamw import Snapshot

pytestmark = pytest.mark.usefixtures("small_frames")


# Cadence


@pytest.mark.parametrize(
    ("evaluate_every", "every", "validation", "expected"),
    [
        (0, 2, 0, [(2, False), (4, False), (6, False)]),
        (0, 2, 7, [(2, False), (4, False), (6, True)]),
        (2, 4, 7, [(2, True), (4, True), (6, True)]),
        (4, 5, 7, [(4, True), (5, False), (6, True)]),
        (2, 100, 0, [(6, False)]),
        (6, 100, 7, [(6, True)]),
    ],
)
def test_checkpoints_and_validations(
    evaluate_every: int, every: int, validation: int, expected: list[tuple[int, bool]]
):
    problem = ExactProblem(
        validation_samples=validation,
        training__evaluate_every=evaluate_every,
        checkpoint__every=every,
    )
    cluster = SimulatedCluster(problem, workers=2)
    cluster.run_to_end()
    assert saved(cluster) == expected
    validated = [event["at_step"] for event in cluster.named("validation")]
    assert validated == [step for step, scored in expected if scored]
    assert [event["step"] for event in cluster.named("step")] == list(range(1, 7))


def test_hashes_are_proved_every_few_steps_and_at_the_end():
    problem = ExactProblem(samples=56, training__epochs=1, exchange__hash_every=3)
    cluster = SimulatedCluster(problem, workers=3)
    cluster.run_to_end()
    assert [event["at_step"] for event in cluster.named("verified")] == [3, 6, 7]
    assert all(event["ranks"] == [0, 1, 2] for event in cluster.named("verified"))


def test_a_checkpoint_never_changes_while_it_is_written(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    cluster.run_to_end()
    assert len(cluster.saves) == 3
    for save in cluster.saves:
        assert isinstance(save.snapshot, Snapshot)
        assert save.snapshot.weights.tobytes() == problem.trajectory[save.snapshot.step]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 9])
def test_any_number_of_workers_ends_with_the_same_weights(problem: ExactProblem, workers: int):
    cluster = SimulatedCluster(problem, workers)
    cluster.run_to_end()
    ends = [worker.ended for worker in cluster.workers]
    assert all(end and end.exit_code == 0 and end.reason == "done" for end in ends)
    for worker in cluster.workers:
        assert worker.state
        assert worker.state.weights.tobytes() == problem.trajectory[-1]


# The end


def test_a_loss_that_no_longer_falls_ends_the_run():
    """The validation loss of this problem is always the same; the last state is proved."""
    problem = ExactProblem(
        training__evaluate_every=1, training__early_stopping_patience=2, exchange__hash_every=100
    )
    cluster = SimulatedCluster(problem, workers=3)
    cluster.start()
    while cluster.finish is None:
        cluster.pass_time(TICK)
        cluster.settle_down()
    assert cluster.finish.exit_code == 0
    assert "of step 1, in 2 validations" in cluster.finish.reason
    for kind, key in (("step", "step"), ("validation", "at_step"), ("verified", "at_step")):
        assert [event[key] for event in cluster.named(kind)] == [1, 2, 3]
    assert not cluster.named("unverified")
    assert saved(cluster)[-1] == (3, True)
    assert all(w.ended and w.ended.reason == cluster.finish.reason for w in cluster.workers)


def test_nobody_joins_a_run_that_is_over(problem: ExactProblem):
    cluster = SimulatedCluster(problem, workers=2)
    cluster.workers[0].mute = True
    until_step(cluster, problem.plan.total_steps)
    while cluster.machine.phase != "finishing":
        cluster.go_on()
    late = cluster.workers[1]
    cluster.kill(late)
    cluster.revive(late)
    cluster.connect(late)
    cluster.deliver_up(late)
    cluster.deliver_down(late)
    assert late.refused is None
    _, event = late.events[-1]
    assert event == Shutdown(reason="the run is over", exit_code=0)


# Restarting


@pytest.mark.parametrize("step", range(7))
def test_a_killed_coordinator_goes_on_from_its_checkpoint(problem: ExactProblem, step: int):
    cluster = SimulatedCluster(problem, workers=3)
    until_step(cluster, step)
    last = saved(cluster)[-1][0] if cluster.saves else 0
    generation = cluster.machine.membership.generation if cluster.coordinator else 0
    cluster.kill_coordinator(delivered=50)
    cluster.start_coordinator()
    assert cluster.step == last
    assert cluster.machine.membership.generation <= generation
    cluster.run_to_end()
    steps = [event["step"] for event in cluster.named("step")]
    assert steps == [*range(1, step + 1), *range(last + 1, 7)]


@pytest.mark.parametrize("shares", ["equal", (3.0, 1.0, 2.0)])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_gradients_that_round_give_the_same_bits_for_the_same_split(
    codec: str, shares: str | tuple[float, ...]
):
    """Also across a restart of the coordinator, and whatever order contributions come in."""

    class Rounding(ExactProblem):
        """Gradients whose sums depend on the order of adding."""

        def gradient(self, epoch: int, position: int) -> np.ndarray:
            drawn = np.random.default_rng([epoch, position]).standard_normal(self.layout.size)
            return (drawn * 10.0 ** (position % 5)).astype(np.float32)

    problem = Rounding(exchange__codec=codec, exchange__split=shares)

    def run(seed: int, restart_at: int | None = None) -> dict[int, bytes]:
        order = random.Random(seed)
        weights: dict[int, bytes] = {}
        cluster = SimulatedCluster(problem, workers=3)
        # Here the right weights are those of the first run, not those of exact sums.
        cluster.check = lambda: None
        cluster.record = lambda event: cluster.events.append(event)
        problem.trajectory = [b""] * 99
        while not cluster.finish:
            for worker in order.sample(cluster.workers, 3):
                cluster.connect(worker)
                cluster.deliver_up(worker, order.choice([None, 30, 300]))
                cluster.deliver_down(worker, order.choice([None, 30, 300]))
                worker.step()
                training = cluster.machine.training
                assert training is not None
                weights[cluster.step] = training.state.weights.tobytes()
            if restart_at is not None and cluster.step == restart_at:
                restart_at = None
                problem.trajectory = [weights.get(step, b"") for step in range(99)]
                cluster.kill_coordinator()
                cluster.start_coordinator()
            cluster.pass_time(TICK, flowing=False)
        for worker in cluster.workers:
            assert worker.state
            assert worker.state.weights.tobytes() == weights[6], "F-DP-001"
        return weights

    backwards = [problem.gradient(0, position) for position in reversed(range(8))]
    forwards = problem.shard_gradient(0, 0, 8)
    assert sum(backwards, np.float32(0)).tobytes() != forwards.tobytes(), "else nothing is shown"
    uninterrupted = run(seed=1)
    assert run(seed=2) == uninterrupted
    assert run(seed=3, restart_at=3) == uninterrupted
    assert run(seed=4, restart_at=5) == uninterrupted


# Averages


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (5.0, 1.0, 2.0), (1.0, 0.0, 7.0)])
def test_unequal_shares_average_like_one_worker(shares: tuple[float, ...]):
    """Sums and weights, not means of means: exact here, since the sums are."""
    problem = ExactProblem(exchange__split=shares)
    cluster = SimulatedCluster(problem, workers=len(shares))
    cluster.run_to_end()
    for event, following in pairwise(cluster.named("step")):
        assert following["step"] == event["step"] + 1
    sizes = [[stop - start for _, start, stop in e["sample_ranges"]] for e in cluster.named("step")]
    assert len(sizes[0]) == sum(share > 0 for share in shares)


# Balance


def test_a_worker_that_would_slow_the_run_is_idle_and_comes_back():
    problem = ExactProblem(samples=400, exchange__split="measured", training__evaluate_every=0)
    cluster = SimulatedCluster(problem, workers=2)
    fast, slow = cluster.workers
    fast.seconds_per_sample, slow.seconds_per_sample = 0.1, 5.0
    until_step(cluster, 60)
    tried = [e for e in cluster.named("step") if 1 in {rank for rank, *_ in e["sample_ranges"]}]
    assert len(tried) >= 3, "a sample now and then shows whether it got faster"
    told = [{k: e[k] for k in ("rank", "reason")} for e in cluster.named("idle")]
    assert told == [{"rank": 1, "reason": "would slow the step"}], "said once"
    assert not cluster.named("active")
    assert [rank for rank, *_ in cluster.named("step")[-1]["sample_ranges"]] == [0]
    slow.seconds_per_sample = 0.1
    until_step(cluster, 95)
    assert {rank for rank, *_ in cluster.named("step")[-1]["sample_ranges"]} == {0, 1}
    assert [event["rank"] for event in cluster.named("active")] == [1]
    assert len(slow.commits) >= 94, "idle or not, it applies every step"
    cluster.run_to_end()
