"""F-DP-003: one NaN or Inf halts everyone before the update and says where it came from."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.exchange.exact_problem import ExactProblem
from tests.trainer.exchange.simulated_cluster import TICK, SimulatedCluster
from trainer.optimizer.adamw import Snapshot

pytestmark = pytest.mark.usefixtures("small_frames")

NEVER = [float("nan"), float("inf"), float("-inf")]


@cache
def problem(codec: str = "fp32") -> ExactProblem:
    return ExactProblem(exchange__codec=codec)


def run_until(cluster: SimulatedCluster, seed: int, step: int | None) -> None:
    """Let the network and the workers go on in a random order, to a step or to the end."""
    order = random.Random(seed)
    limit = cluster.now + 100
    while not cluster.finish and (step is None or cluster.step < step):
        assert cluster.now < limit
        for worker in order.sample(cluster.workers, len(cluster.workers)):
            cluster.connect(worker)
            cluster.deliver_up(worker, order.choice([None, 40, 400]))
            if cluster.finish:
                return
            cluster.deliver_down(worker, order.choice([None, 40, 400]))
            if worker.present:
                worker.step()
        if order.random() < 0.2:
            cluster.pass_time(TICK, flowing=False)


def assert_halted(cluster: SimulatedCluster, step: int) -> str:
    """Check that the run ended at `step` without its update, for everyone, and return why."""
    assert cluster.end.exit_code == 5
    assert cluster.named("halted") == [
        {"event": "halted", "reason": cluster.end.reason, "non_finite": True}
    ]
    assert "\n" not in cluster.end.reason
    assert cluster.step == step, "no update was applied"
    cluster.check()  # everyone is at the weights of before
    for worker in cluster.workers:
        assert worker.state
        assert worker.state.step <= step
        assert np.isfinite(worker.state.weights).all()
        assert worker.ended
        assert worker.ended.exit_code == 5
        assert worker.ended.reason == cluster.end.reason
    for save in cluster.saves:
        assert isinstance(save.snapshot, Snapshot)
        assert save.snapshot.weights.tobytes() == problem().trajectory[save.snapshot.step]
    return cluster.end.reason


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    step=st.integers(0, 4),
    rank=st.integers(0, 2),
    element=st.integers(0, 25),
    value=st.sampled_from(NEVER),
)
def test_f_dp_003_in_a_gradient(seed: int, step: int, rank: int, element: int, value: float):
    cluster = SimulatedCluster(problem(), workers=3)
    run_until(cluster, seed, step)
    block = next(block for block in problem().layout.blocks if element < block.stop)
    cluster.workers[rank].poison = (block.index, element - block.start, value)
    run_until(cluster, seed + 1, None)
    tensor = problem().layout.find_tensor(block.index, element - block.start)
    reason = assert_halted(cluster, cluster.step)
    assert cluster.step in (step, step + 1)
    assert f"step {cluster.step + 1}: rank {rank} sent {value} " in reason
    assert f"in block {block.name}, tensor {tensor.name}" in reason


@settings(max_examples=20, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    step=st.integers(0, 4),
    rank=st.integers(0, 2),
    value=st.sampled_from(NEVER),
)
def test_f_dp_003_in_a_loss(seed: int, step: int, rank: int, value: float):
    cluster = SimulatedCluster(problem(), workers=3)
    run_until(cluster, seed, step)
    cluster.workers[rank].poison = (-1, 0, value)
    run_until(cluster, seed + 1, None)
    reason = assert_halted(cluster, cluster.step)
    assert f"step {cluster.step + 1}: rank {rank} computed a loss that is not finite" in reason


@pytest.mark.parametrize("element", [0, 4, 17])
def test_f_dp_003_what_the_codec_makes_infinite(element: int):
    cluster = SimulatedCluster(problem("bf16"), workers=3)
    block = next(block for block in problem().layout.blocks if element < block.stop)
    largest = float(np.finfo(np.float32).max)
    cluster.workers[1].poison = (block.index, element - block.start, largest)
    run_until(cluster, 1, None)
    assert f"rank 1 sent inf in block {block.name}" in assert_halted(cluster, 0)


def test_f_dp_003_finite_parts_of_an_infinite_average():
    cluster = SimulatedCluster(problem(), workers=3)
    for worker in cluster.workers:
        worker.poison = (1, 2, float(np.finfo(np.float32).max))
    run_until(cluster, 1, None)
    reason = assert_halted(cluster, 0)
    assert "the average sent inf in block layers.1, tensor layers.1.q" in reason


def test_f_dp_003_finite_parts_of_an_infinite_loss():
    cluster = SimulatedCluster(problem(), workers=3)
    for worker in cluster.workers:
        worker.poison = (-1, 0, 1.7e308)
    run_until(cluster, 1, None)
    assert "step 1: the sum of all workers' losses overflows" in assert_halted(cluster, 0)


@pytest.mark.parametrize("value", NEVER)
def test_f_dp_003_also_in_what_was_dealt_again(value: float):
    cluster = SimulatedCluster(problem(), workers=3)
    run_until(cluster, 5, 2)
    cluster.kill(cluster.workers[0])
    cluster.workers[2].poison = (3, 1, value)
    while not cluster.finish:
        cluster.go_on()
    assert cluster.end.exit_code == 5
    assert "rank 2" in cluster.end.reason
    assert "tensor head.weight" in cluster.end.reason
    cluster.check()


def test_f_dp_003_a_bad_contribution_that_does_not_count_halts_nobody():
    """From a worker that was dropped, or broken off in the middle: it never reaches the sum."""
    cluster = SimulatedCluster(problem(), workers=3)
    run_until(cluster, 5, 1)
    bad = cluster.workers[1]
    bad.poison = (1, 0, float("nan"))
    while not (bad.wire and not bad.wire.up.empty):
        cluster.deliver_down(bad)
        bad.step()
    cluster.kill(bad, delivered=60)
    bad.poison = None
    cluster.run_to_end()
