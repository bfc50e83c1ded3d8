"""F-DP-002 with real processes that add up their gradients on their host, and fail at it."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.real_cluster import STEPS, Cluster
from tests.cluster.real_process import Process
from tests.contracts.test_f_dp_002_processes import QUICK, assert_every_sample_once
from tests.covering import covering
from tests.waiting import PATIENCE, wait_for
from trainer.exchange.transport.shared_memory import supported

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not supported(), reason="no sealed anonymous files here"),
]

CARRIER, CARRIED, WITNESS = 0, 1, 2


@pytest.fixture
def shared_memory() -> bool:
    """None with the coordinator: as if the workers were on another host."""
    return False


class Together:
    """A run of three workers on one host; the first one carries, and one of them fails."""

    def __init__(self, cluster: Cluster, failing: int, *flags: str) -> None:
        cluster.certified = cluster.sum_on_host = True
        cluster.configure(**QUICK | {"exchange__step_deadline": PATIENCE}, training__epochs=2)
        self.cluster = cluster
        self.coordinator = cluster.coordinator(3)
        self.workers: list[Process] = []
        # The last worker waits shortly before the end: a fast run would be over before a worker
        # has found its carrier again.
        self.gate = cluster.folder / "gate"
        gated = ("--gate", f"{2 * STEPS - 4}:{self.gate}")
        for rank in range(3):
            mine = flags if rank == failing else gated if rank == WITNESS else ()
            self.workers.append(cluster.worker(rank, "--seconds", "0.005", *mine))
            cluster.wait_event("joined", rank=rank)

    def is_together(self) -> bool:
        """Whether one worker carries the two others now."""
        carriers: dict[int, int | None] = {}
        for event in self.cluster.events("carried", "lost"):
            if event["event"] == "carried":
                carriers[event["rank"]] = event["by"]
            else:
                gone = event["rank"]
                carriers = {r: by for r, by in carriers.items() if gone not in (r, by)}
        carried = [by for by in carriers.values() if by is not None]
        return len(carried) == 2 and carried[0] == carried[1]

    def check(self) -> None:
        """See the run through, and that they came together again."""
        cluster = self.cluster
        wait_for(self.is_together, "one worker to carry the others", cluster)
        self.gate.touch()
        assert [p.wait() for p in (self.coordinator, *self.workers)] == [0, 0, 0, 0]
        assert_every_sample_once(cluster)
        first, *_, last = cluster.records("step")
        assert first["together"] == [[0, 1, 2]]
        assert last["together"] == [[0, 1, 2]]
        assert last["exchange_bytes"] == first["exchange_bytes"]


def test_three_workers_send_one_gradient(cluster: Cluster) -> None:
    run = Together(cluster, CARRIED)
    run.check()
    assert [(e["rank"], e["by"]) for e in cluster.events("carried")] == [(1, 0), (2, 0)]
    steps = cluster.records("step")
    assert len({step["exchange_bytes"] for step in steps}) == 1
    assert steps[0]["exchange_bytes"] % 4 == 0, "one gradient came, three averages went"


@pytest.mark.parametrize(
    ("role", "fault"),
    covering(
        [
            ("carrier", "kill"),
            ("carried", "cut"),
            ("carrier", "stall"),
            ("carried", "kill"),
            ("carried", "stall"),
            ("carrier", "cut"),
        ]
    ),
)
def test_one_fails_in_the_middle_of_a_block(cluster: Cluster, role: str, fault: str) -> None:
    failing = {"carrier": CARRIER, "carried": CARRIED}[role]
    run = Together(cluster, failing, "--half", f"5:{fault}")
    alone = fault == "cut" and failing == CARRIED
    if alone:
        cluster.wait_event("carried", rank=CARRIED, by=None)
    else:
        assert cluster.wait_event("lost", rank=failing)["step"] >= 5
    if fault == "kill":
        assert run.workers[failing].wait() == -signal.SIGKILL
        run.workers[failing] = cluster.worker(failing, "--seconds", "0.005")
    elif fault == "stall":
        run.workers[failing].signal(signal.SIGCONT)
    run.check()
    assert {event["rank"] for event in cluster.events("lost")} == (set() if alone else {failing})
    assert cluster.events("redealt")
    assert len(cluster.records("step")) == 2 * STEPS


def test_a_value_that_is_not_finite_is_named_by_its_rank(cluster: Cluster) -> None:
    run = Together(cluster, CARRIED, "--nan", "3")
    assert run.coordinator.wait() == 5
    (halted,) = cluster.events("halted")
    assert f"rank {CARRIED} " in halted["reason"]
    assert "step 4" in halted["reason"]
