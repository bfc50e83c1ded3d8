"""Connections without a certificate cost a run nothing that it would miss."""

from __future__ import annotations

import re
import resource
import signal

import pytest

from tests.cluster.crowd import Crowd, resident
from tests.cluster.real_cluster import Cluster
from tests.waiting import wait_for
from trainer.exchange.transport.refusals import INTERVAL, LINES

pytestmark = pytest.mark.cluster

DESCRIPTORS = 256
MIB = 1024 * 1024


def test_a_crowd_of_strangers_ends_no_run(cluster: Cluster) -> None:
    """Idle and half-open TLS: no step is lost, no checkpoint fails, and a worker returns after."""
    cluster.configure(training__epochs=1000)
    cluster.limits = {resource.RLIMIT_NOFILE: DESCRIPTORS}
    tls = cluster.bench.tls
    coordinator = cluster.coordinator(3, "--tls", str(tls / "coordinator"))

    def worker(rank: int) -> None:
        cluster.worker(rank, "--tls", str(tls / f"rank-{rank}"), "--seconds", "0.003")

    for rank in range(3):
        worker(rank)
    cluster.wait_step(5)
    quiet, logged = resident(coordinator.pid), coordinator.log.stat().st_size
    most = 0
    with Crowd(
        cluster.port, count=100_000, rate=400, held=2 * DESCRIPTORS, kinds=["idle", "half-TLS"]
    ) as crowd:
        wait_for(lambda: crowd.opened > 1000, "a crowd", cluster)
        at = cluster.step

        def some_steps_later() -> bool:
            nonlocal most
            most = max(most, resident(coordinator.pid))
            return cluster.step > at + 50

        def counted() -> bool:
            """Whether a line of the next interval has told how many it stands for."""
            said = [event["reason"] for event in cluster.events("refused")]
            return any(re.search(r"\(\d+ more before it\)", reason) for reason in said)

        def saved_beside_it() -> bool:
            steps = [event["step"] for event in cluster.events("checkpoint")]
            return len([step for step in steps if step > at]) > 2

        wait_for(some_steps_later, "steps beside the crowd", cluster)
        wait_for(saved_beside_it, "checkpoints beside the crowd", cluster)
        wait_for(counted, "a line for many connections", cluster)
    cluster.processes[-1].kill()
    worker(2)  # its address is the crowd's own, whose last connections time out
    cluster.wait_event("rejoined", rank=2)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert {event["rank"] for event in cluster.events("lost")} == {2}
    saved = [event["step"] for event in cluster.events("checkpoint")]
    assert not cluster.events("alarm")
    assert saved[-1] == cluster.step
    cluster.check_contracts_so_far([0, 1, 2])
    assert most - quiet < 40 * MIB, f"{(most - quiet) / MIB:.0f} MiB for {crowd.opened} strangers"
    times = [event["time"] for event in cluster.events("refused")]
    assert all(
        later - earlier > INTERVAL / 2
        for earlier, later in zip(times, times[2 * LINES :], strict=False)
    ), "a few lines in ten seconds, however many connections"
    assert coordinator.log.stat().st_size - logged < 64 * 1024
    assert "Too many open files" not in coordinator.text
