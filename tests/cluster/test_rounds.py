"""Rounds with real processes: equal weights after every commit, and what a fault costs."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cluster.real_cluster import BATCH, STEPS, Cluster
from tests.cluster.real_process import Process
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

INNER = 4
ROUNDS = {
    "exchange__schedule": "rounds",
    "exchange__inner_steps": INNER,
    "training__batch_size": BATCH // INNER,
    "training__epochs": 2,
}
"""A round takes as many samples as an ordinary step of the other tests; every fourth flushes."""


def test_kill_9_in_the_middle_of_a_round_between_settled_commits(cluster: Cluster) -> None:
    """Its samples are dealt again and count once; it comes back and holds the same weights."""
    cluster.configure(**ROUNDS)
    coordinator = cluster.coordinator(3)
    dying = cluster.worker(1, "--die", "5:block", "--seconds", "0.01")
    gate = cluster.folder / "gate"
    others = [cluster.worker(rank, "--gate", f"8:{gate}") for rank in (0, 2)]
    assert dying.wait() == -signal.SIGKILL
    assert cluster.wait_event("lost", rank=1)["step"] == 5
    again = cluster.worker(1)
    cluster.wait_event("rejoined", rank=1)
    gate.touch()
    assert [coordinator.wait(), *(worker.wait() for worker in (*others, again))] == [0, 0, 0, 0]
    cluster.check_contracts([0, 1, 2])
    assert {rank for rank, *_ in cluster.records("step")[5]["sample_ranges"]} == {0, 2}
    assert [event["at_step"] for event in cluster.events("verified")] == list(
        range(1, 2 * STEPS + 1)
    )


def test_a_worker_stops_and_another_is_cut_off_in_the_middle_of_a_round(cluster: Cluster) -> None:
    """Half of what they send has come, in int4: it counts nowhere, and what they owed is said."""
    cluster.configure(
        **ROUNDS,
        exchange__codec="int4",
        exchange__shared_memory=False,
        exchange__heartbeat=0.2,
        exchange__lost_after=2.5,
    )
    gates = [cluster.folder / name for name in ("first", "second")]
    coordinator = cluster.coordinator(3)
    workers = [
        cluster.worker(0, "--gate", f"9:{gates[0]}"),
        cluster.worker(1, "--half", "5:stall", "--gate", f"15:{gates[1]}"),
        cluster.worker(2, "--half", "11:cut"),
    ]
    assert cluster.wait_event("lost", rank=1)["step"] == 5
    workers[1].signal(signal.SIGCONT)
    cluster.wait_event("rejoined", rank=1)
    gates[0].touch()
    assert cluster.wait_event("lost", rank=2)["step"] == 11
    cluster.wait_event("rejoined", rank=2)
    gates[1].touch()
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0, 0]
    cluster.check_contracts([0, 1, 2])
    owed = cluster.events("residual_lost")
    assert [event["rank"] for event in owed] == [1, 2]
    assert all(event["norm"] > 0 for event in owed)
    taken = [{rank for rank, *_ in step["sample_ranges"]} for step in cluster.records("step")]
    assert (taken[5], taken[11]) == ({0, 2}, {0, 1})
    assert [event["at_step"] for event in cluster.events("verified")] == list(
        range(1, 2 * STEPS + 1)
    )


def kill_after(cluster: Cluster, coordinator: Process, verified: int, saved: int) -> None:
    """Kill the coordinator once a step's weights were compared and a checkpoint is whole."""
    cluster.wait_event("verified", at_step=verified)
    manifest = cluster.output / "checkpoints" / f"step-{saved:06}" / "manifest.json"
    wait_for(manifest.exists, f"the checkpoint of step {saved}", cluster)
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()


@pytest.mark.smoke("resume")
def test_a_coordinator_that_dies_replays_from_the_last_settled_commit_bit_for_bit(
    cluster: Cluster,
) -> None:
    """Residuals of the workers since then did not matter to the flushed state."""
    cluster.configure(**ROUNDS)
    coordinator = cluster.coordinator(2)
    gate = cluster.folder / "gate"
    workers = [cluster.worker(rank, "--gate", f"6:{gate}") for rank in (0, 1)]
    kill_after(cluster, coordinator, verified=6, saved=4)
    before = proofs(cluster)
    coordinator = cluster.coordinator(2)
    gate.touch()
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    cluster.check_contracts([0, 1])
    assert [event["step"] for event in cluster.events("resumed")] == [4]
    after = proofs(cluster)
    assert set(before) == {1, 2, 3, 4, 5, 6}
    assert all(len(digests) == 1 for digests in after.values()), after
    assert [len(after[step]) for step in before] == [1] * 6


def test_a_coordinator_that_dies_in_the_first_round_resumes_between_steps_and_rounds(
    cluster: Cluster,
) -> None:
    """Workers go back to steps' moments with it, and all ends as if nothing had happened."""
    cluster.configure(**ROUNDS, exchange__rounds_after=6)
    coordinator = cluster.coordinator(2)
    gate = cluster.folder / "gate"
    workers = [cluster.worker(rank, "--gate", f"7:{gate}") for rank in (0, 1)]
    kill_after(cluster, coordinator, verified=7, saved=6)
    coordinator = cluster.coordinator(2)
    gate.touch()
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert [event["step"] for event in cluster.events("resumed")] == [6]
    assert cluster.step == cluster.status["total_steps"] == 6 + 11 + 12
    assert cluster.status["inner_steps"] == INNER
    sizes = [
        sum(stop - start for _, start, stop in s["sample_ranges"]) for s in cluster.records("step")
    ]
    batch = BATCH // INNER
    assert sizes == [batch] * 6 + [BATCH] * 10 + [2 * batch] + [BATCH] * 12
    after = proofs(cluster)
    assert [len(after[step]) for step in range(1, 30)] == [1] * 29


def proofs(cluster: Cluster) -> dict[int, set[str]]:
    """Return by step all digests that were proved, also in a future that was abandoned."""
    found: dict[int, set[str]] = {}
    for line in (cluster.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record.get("event") == "verified":
            found.setdefault(record["at_step"], set()).add(record["digest"])
    return found


def test_rounds_that_are_too_long_are_refused_before_anything_is_made(cluster: Cluster) -> None:
    cluster.configure(**ROUNDS | {"exchange__inner_steps": 5})
    coordinator = cluster.coordinator(2, listening=False)
    assert coordinator.wait() == 2
    assert "5 of the run's 96 steps leave fewer than 20 rounds" in coordinator.text
    assert "Traceback" not in coordinator.text
    assert not cluster.output.exists()
