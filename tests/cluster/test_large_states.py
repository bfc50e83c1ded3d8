"""A state that takes many times `lost_after` to arrive, in small: a thin line, not gigabytes."""

from __future__ import annotations

import signal
import time

import pytest

from tests.cluster.proxy import FaultProxy
from tests.cluster.real_cluster import Cluster
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

LOST_AFTER = 2.0
STATE = 3 * 4 * 107_000
"""Bytes of the bench's weights and moments."""


def test_a_state_of_many_times_lost_after_joins_a_run_that_goes_on(cluster: Cluster) -> None:
    """Heartbeats do not fill the queue behind it, and neither side takes the other for dead."""
    cluster.configure(
        training__epochs=1000, exchange__heartbeat=0.02, exchange__lost_after=LOST_AFTER
    )
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, "--seconds", "0.03") for rank in (0, 1)]
    cluster.wait_step(2)
    with FaultProxy(cluster.port) as proxy:
        proxy.rate = STATE / (10 * LOST_AFTER)
        late = cluster.worker(2, address=proxy.address)
        wait_for(lambda: proxy.connections, "the joiner connects", cluster)
        began, at = time.monotonic(), cluster.step
        wait_for(lambda: time.monotonic() - began > 4 * LOST_AFTER, "its state is on the way")
        assert not cluster.events("lost")
        assert not cluster.events("joined", rank=2)
        assert cluster.step >= at + 2, "training does not wait"
        proxy.rate = 0
        cluster.wait_event("joined", rank=2)
        at = cluster.step
        cluster.wait_step(at + 3)
        late.signal(signal.SIGTERM)
        assert late.wait() == 0
        coordinator.signal(signal.SIGTERM)
        assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert {event["rank"] for event in cluster.events("lost")} <= {2}
    assert {rank for rank, *_ in cluster.records("step")[at + 1]["sample_ranges"]} == {0, 1, 2}
    cluster.check_contracts_so_far()
