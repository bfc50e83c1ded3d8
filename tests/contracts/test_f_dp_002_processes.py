"""F-DP-001, F-DP-002 and F-DP-006 with real processes that die, stall and come back in a step."""

from __future__ import annotations

import signal

import numpy as np
import pytest
from numpy_replica import expected_moments
from real_cluster import STEPS, Cluster

pytestmark = pytest.mark.cluster

QUICK = {"exchange__heartbeat": 0.2, "exchange__lost_after": 2.5, "exchange__step_deadline": 2.5}
"""Soon noticed, and yet no busy machine makes a worker late that nobody stopped."""


def assert_every_sample_once(cluster: Cluster) -> None:
    """Compare with a replay in double precision: no trust in the coordinator's own ledger."""
    cluster.check_contracts()
    arrays = cluster.arrays()
    for name, expected in zip(
        ("first_moment", "second_moment"), expected_moments(cluster.run_file), strict=True
    ):
        error = np.abs(arrays[name] - expected).max() / np.abs(expected).max()
        assert error < 1e-6, f"{name} is off by {error}"


@pytest.mark.parametrize("point", ["block", "uploaded"])
def test_kill_9_in_the_middle_of_a_step(cluster: Cluster, point: str) -> None:
    """Before its gradients are whole its samples are dealt again, afterwards they count."""
    cluster.configure(**QUICK, training__epochs=2)  # time for a new process to come in
    coordinator = cluster.coordinator(3)
    dying = cluster.worker(1, "--die", f"3:{point}", "--seconds", "0.01")
    others = [cluster.worker(rank, "--seconds", "0.03") for rank in (0, 2)]
    assert dying.wait() == -signal.SIGKILL
    lost = cluster.wait_event("lost", rank=1)
    cluster.worker(1)
    cluster.wait_event("rejoined", rank=1)
    assert [coordinator.wait(), *(worker.wait() for worker in others)] == [0, 0, 0]
    assert_every_sample_once(cluster)
    takers = {rank for rank, _, _ in cluster.records("step")[3]["samples"]}
    redealt = cluster.events("redealt")
    if point == "block":
        assert lost["step"] == 3
        assert redealt[0]["rank"] == 1
        assert takers == {0, 2}
    else:
        assert not redealt
        assert takers == {0, 1, 2}
    assert cluster.records("step")[-1]["shares"].keys() == {"0", "1", "2"}


def test_sigstop_past_the_deadline_then_sigcont(cluster: Cluster) -> None:
    """The stopped worker is fenced off; what it sends when it wakes up counts nowhere."""
    cluster.configure(**QUICK, training__epochs=4)
    coordinator = cluster.coordinator(3)
    workers = [cluster.worker(rank, "--seconds", "0.01") for rank in range(3)]
    cluster.wait_step(2)
    workers[2].signal(signal.SIGSTOP)
    cluster.wait_event("lost", rank=2)
    at = cluster.step
    cluster.wait_step(at + 2)
    workers[2].signal(signal.SIGCONT)
    back = cluster.wait_event("rejoined", rank=2)
    assert back["step"] >= at + 2
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0, 0]
    assert_every_sample_once(cluster)
    assert cluster.status["total_steps"] == 4 * STEPS


def test_a_worker_that_beats_but_does_not_finish(cluster: Cluster) -> None:
    """Heartbeats keep a busy worker in, but do not excuse a shard that misses the deadline."""
    cluster.configure(**QUICK, training__epochs=4)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(0, "--seconds", "0.01"), cluster.worker(1, "--stall", "4:4")]
    lost = cluster.wait_event("lost", rank=1)
    assert "deadline" in lost["reason"]
    cluster.wait_event("rejoined", rank=1)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert_every_sample_once(cluster)


def test_a_late_joiner_takes_its_share(cluster: Cluster) -> None:
    cluster.configure(training__epochs=2)
    coordinator = cluster.coordinator(1)
    workers = [cluster.worker(0, "--seconds", "0.01")]
    cluster.wait_step(2)
    workers.append(cluster.worker(5))
    joined = cluster.wait_event("joined", rank=5)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert_every_sample_once(cluster)
    after = [step for step in cluster.records("step") if step["step"] > joined["step"] + 2]
    assert after
    assert all(step["shares"] == {"0": 16, "5": 16} for step in after)


def test_all_workers_die_and_one_returns(cluster: Cluster) -> None:
    """The step that was under way waits for somebody to take it."""
    cluster.configure(**QUICK)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, "--die", "5:block", "--seconds", "0.01") for rank in (0, 1)]
    assert [worker.wait() for worker in workers] == [-signal.SIGKILL, -signal.SIGKILL]
    back = cluster.worker(0)
    assert [coordinator.wait(), back.wait()] == [0, 0]
    assert_every_sample_once(cluster)
