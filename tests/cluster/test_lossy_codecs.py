"""Quantised codecs between real processes: a worker and the coordinator die."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.proxy import FaultProxy
from tests.cluster.real_cluster import Cluster
from tests.cluster.test_rounds import ROUNDS

pytestmark = pytest.mark.cluster

BYTES = {"int8": 1.016, "int4": 0.531}
"""An element."""


@pytest.mark.smoke("kill")
@pytest.mark.parametrize(
    ("codec", "certified"), [("int8", True), ("int4", False)], ids=["int8 TLS", "int4 memory"]
)
def test_kill_9_between_saved_commits(cluster: Cluster, codec: str, certified: bool) -> None:
    """All who are left hold the same weights; of rounds in int4, what the dead owed is said."""
    has_residuals = codec == "int4"
    cluster.certified = certified
    cluster.configure(
        exchange__codec=codec,
        exchange__shared_memory=not certified,
        exchange__lost_after=5.0,
        checkpoint__every=4,
        **(ROUNDS if has_residuals else {}),
    )
    gate = cluster.folder / "gate"
    coordinator = cluster.coordinator(3)
    dying = cluster.worker(1, "--die", "5:uploaded")  # the sixth step
    others = [
        cluster.worker(0, "--seconds", "0.01"),
        cluster.worker(2, "--seconds", "0.01", "--gate", f"9:{gate}"),  # the tenth
    ]
    assert dying.wait() == -signal.SIGKILL
    if has_residuals:
        lost = cluster.wait_event("residual_lost", rank=1)
        assert lost["norm"] > 0
        assert 4 < lost["step"] < 8, "between two flush commits"
    cluster.wait_event("checkpoint", step=8)
    cluster.wait_step(9)
    coordinator.kill()
    coordinator = cluster.coordinator(2)
    resumed = cluster.wait_event("resumed")
    assert resumed["step"] == 8, "the last saved one"
    gate.touch()
    assert [coordinator.wait(), *(worker.wait() for worker in others)] == [0, 0, 0]
    cluster.check_contracts(ranks=[0, 2])
    sizes = [step["exchange_bytes"] for step in cluster.records("step")]
    assert sizes[0] == sizes[1] == sizes[2]
    # A flush round is sent in bf16, with as many second moments.
    flushed = 2 * 2 / BYTES[codec] if has_residuals else 1
    assert sizes[3] / sizes[0] == pytest.approx(flushed, rel=0.03)
    assert bool(cluster.events("residual_lost")) == has_residuals


@pytest.mark.long
def test_auto_follows_the_line(cluster: Cluster) -> None:
    """int8 over a slow line, bf16 again over a fast one, and the same weights all the time."""
    cluster.configure(exchange__codec="auto", exchange__shared_memory=False, training__epochs=20)
    with FaultProxy(cluster.port) as proxy:
        proxy.rate = 1e6
        coordinator = cluster.coordinator(2)
        workers = [cluster.worker(rank, address=proxy.address) for rank in (0, 1)]
        slow = cluster.wait_event("codec")
        assert (slow["codec"], slow["step"]) == ("int8", 13)
        assert slow["exposed_ms"]["bf16"] > slow["exposed_ms"]["int8"] > 0
        proxy.rate = 0.0
        assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    cluster.check_contracts([0, 1])
    sizes = [step["exchange_bytes"] for step in cluster.records("step")]
    assert sizes[14] / sizes[0] == pytest.approx(BYTES["int8"] / 2, rel=0.03)
