"""F-DP-001, F-DP-002 and F-DP-006 with real processes that die, stall and come back in a step."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.numpy_replica import expected_moments
from tests.cluster.real_cluster import STEPS, Cluster
from tests.cluster.real_process import Process
from tests.covering import covering
from tests.waiting import PATIENCE, wait_for
from trainer.config import run
from trainer.run.inputs import read_inputs

pytestmark = pytest.mark.cluster

QUICK = {"exchange__heartbeat": 0.2, "exchange__lost_after": 2.5, "exchange__step_deadline": 2.5}
"""A stopped worker is soon noticed; on a busy machine others may be late, too."""

PATIENT = {"exchange__lost_after": PATIENCE, "exchange__step_deadline": PATIENCE}
"""Only the end of a connection loses a worker."""


TRANSPORTS = ("shared memory", "TLS")


@pytest.fixture(params=TRANSPORTS)
def shared_memory(request: pytest.FixtureRequest) -> bool:
    """Every test here runs on both transports."""
    return request.param == "shared memory"


@pytest.fixture
def cluster(cluster: Cluster, shared_memory: bool) -> Cluster:
    """Return a cluster whose workers meet over one of them."""
    cluster.certified = not shared_memory
    return cluster


def transport(cluster: Cluster) -> str:
    return "TLS" if cluster.certified else "shared memory"


def assert_every_sample_once(cluster: Cluster) -> None:
    """Compare with a replay in double precision: no trust in the coordinator's own ledger."""
    cluster.check_contracts()
    arrays = cluster.arrays()
    for name, expected in zip(
        ("first_moment", "second_moment"), expected_moments(cluster.run_file), strict=True
    ):
        error = np.abs(arrays[name] - expected).max() / np.abs(expected).max()
        assert error < 1e-6, f"{name} is off by {error}"


@pytest.mark.parametrize(
    ("shared_memory", "point"),
    covering(product(TRANSPORTS, ["block", "uploaded"])),
    indirect=["shared_memory"],
)
def test_kill_9_in_the_middle_of_a_step(cluster: Cluster, point: str) -> None:
    """Before its gradients are whole its samples are dealt again, afterwards they count."""
    cluster.configure(**PATIENT, training__epochs=2)  # time for a new process to come in
    coordinator = cluster.coordinator(3)
    dying = cluster.worker(1, "--die", f"3:{point}", "--seconds", "0.01")
    others = [cluster.worker(rank, "--seconds", "0.03") for rank in (0, 2)]
    assert dying.wait() == -signal.SIGKILL
    lost = cluster.wait_event("lost", rank=1)
    cluster.worker(1)
    cluster.wait_event("rejoined", rank=1)
    assert [coordinator.wait(), *(worker.wait() for worker in others)] == [0, 0, 0]
    assert_every_sample_once(cluster)
    takers = {rank for rank, _, _ in cluster.records("step")[3]["sample_ranges"]}
    redealt = cluster.events("reassigned")
    if point == "block":
        assert lost["step"] == 3
        assert redealt[0]["rank"] == 1
        assert takers == {0, 2}
    else:
        # On a busy machine the next step may be dealt before the end is seen.
        assert not [event for event in redealt if event["step"] == 3]
        assert takers == {0, 1, 2}
    assert cluster.records("step")[-1]["worker_samples"].keys() == {"0", "1", "2"}


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
    gate = cluster.folder / "gate"
    workers = [cluster.worker(0, "--seconds", "0.01"), cluster.worker(1, "--gate", f"4:{gate}")]
    lost = cluster.wait_event("lost", rank=1)
    assert "deadline" in lost["reason"]
    gate.touch()
    cluster.wait_event("rejoined", rank=1)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert_every_sample_once(cluster)


def test_a_late_joiner_takes_its_share(cluster: Cluster) -> None:
    cluster.configure(training__epochs=2)
    coordinator = cluster.coordinator(1)
    workers = [cluster.worker(0, "--seconds", "0.01")]
    cluster.wait_step(2)
    workers.append(cluster.worker(2))
    joined = cluster.wait_event("joined", rank=2)
    assert {event["transport"] for event in cluster.events("joined")} == {transport(cluster)}
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert_every_sample_once(cluster)
    after = [step for step in cluster.records("step") if step["step"] > joined["step"] + 2]
    assert after
    assert all(step["worker_samples"] == {"0": 16, "2": 16} for step in after)
    # Worker 0 is the slowest: it sleeps before each of its blocks, and all but one hide something.
    blocks = len(read_inputs(run.load_config(cluster.run_file), "any").layout.blocks)
    for step in after:
        hidden = step["exchange_ms"] - step["exchange_exposed_ms"]
        assert hidden > 1e3 * 16 * 0.01 * (blocks - 1) / blocks
        assert step["exchange_exposed_ms"] > 0
    status = cluster.status
    assert status["exchange_ms"] >= status["exchange_exposed_ms"] > 0


@pytest.mark.smoke("kill")
def test_all_workers_die_and_one_returns(cluster: Cluster) -> None:
    """The step that was under way waits for somebody to take it."""
    cluster.configure(**QUICK)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, "--die", "5:block", "--seconds", "0.01") for rank in (0, 1)]
    assert [worker.wait() for worker in workers] == [-signal.SIGKILL, -signal.SIGKILL]
    back = cluster.worker(0)
    assert [coordinator.wait(), back.wait()] == [0, 0]
    assert_every_sample_once(cluster)


# In the middle of a block


def descriptors(process: Process) -> int:
    """Return how many sockets and files a process has open."""
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def sockets(process: Process) -> int:
    """Return how many sockets a process has open."""
    found = 0
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that was being written
            found += str(entry.readlink()).startswith("socket:")
    return found


def regions(process: Process) -> tuple[int, int]:
    """Return how many upload regions and regions of averages a process maps."""
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8")
    return maps.count("memfd:motley-upload"), maps.count("memfd:motley-averages")


class Held:
    """A run of three workers that waits before its last step, so that one can look at it."""

    def __init__(self, cluster: Cluster, *, half: str = "", worker: str = "") -> None:
        cluster.configure(**QUICK | {"exchange__step_deadline": PATIENCE})
        self.cluster = cluster
        self._gate = cluster.folder / "gate"
        self.coordinator = cluster.coordinator(3, half=half)
        flags = ("--seconds", "0.01", "--gate", f"{STEPS - 1}:{self._gate}")
        self.workers = [
            cluster.worker(rank, *flags, *(("--half", worker) if rank == 1 else ()))
            for rank in range(3)
        ]

    def check(self, ranks: set[int]) -> None:
        """Look at what the processes hold when these ranks have come back, then let them end."""
        cluster = self.cluster
        for rank in ranks:
            cluster.wait_event("rejoined", rank=rank)
        cluster.wait_step(STEPS - 1)
        shared = {
            event["rank"]: event["transport"] == "shared memory"
            for event in cluster.events("joined", "rejoined")
        }
        assert shared.keys() == {0, 1, 2}
        for process, mapped in (
            (self.coordinator, (sum(shared.values()), int(not cluster.certified))),
            *((self.workers[rank], (int(here), int(here))) for rank, here in shared.items()),
        ):
            wait_for(lambda p=process, m=mapped: regions(p) == m, f"{process.name}: {mapped}")
        # A link for each worker, what listens, and the pair by which asyncio wakes itself.
        opened = 3 + 2 - int(cluster.certified) + 2
        wait_for(lambda: sockets(self.coordinator) == opened, f"coordinator: {opened} sockets")
        one = descriptors(self.workers[0])
        for worker in self.workers[1:]:
            wait_for(lambda w=worker: descriptors(w) == one, f"{worker.name}: {one} descriptors")
        self._gate.touch()
        assert [p.wait() for p in (self.coordinator, *self.workers)] == [0, 0, 0, 0]
        assert_every_sample_once(cluster)


@pytest.mark.parametrize(
    ("shared_memory", "fault"),
    covering(product(TRANSPORTS, ["kill", "stall", "cut"])),
    indirect=["shared_memory"],
)
def test_a_worker_fails_in_the_middle_of_a_block(cluster: Cluster, fault: str) -> None:
    """Half a block counts nowhere, also when its other half comes from a worker that woke up."""
    held = Held(cluster, worker=f"5:{fault}")
    assert cluster.wait_event("lost", rank=1)["step"] == 5
    if fault == "kill":
        assert held.workers[1].wait() == -signal.SIGKILL
        held.workers[1] = cluster.worker(1)
    elif fault == "stall":
        held.workers[1].signal(signal.SIGCONT)
    held.check({1})
    assert {event["rank"] for event in cluster.events("lost")} == {1}
    assert {rank for rank, *_ in cluster.records("step")[5]["sample_ranges"]} == {0, 2}


@pytest.mark.parametrize(
    ("shared_memory", "fault"),
    covering(product(TRANSPORTS, ["kill", "stall", "cut"])),
    indirect=["shared_memory"],
)
def test_the_coordinator_fails_in_the_middle_of_a_block(cluster: Cluster, fault: str) -> None:
    """It goes on from its checkpoint, or from where it stopped, and nobody's half is added."""
    held = Held(cluster, half=f"5:{fault}", worker="5:nothing")
    if fault == "kill":
        assert held.coordinator.wait() == -signal.SIGKILL
        held.coordinator = cluster.coordinator(3)
        held.check(set())
        (resumed,) = cluster.events("resumed")
        assert resumed["step"] in (0, 4), "0: it died before its checkpoint was written"
    elif fault == "stall":
        for worker in held.workers:
            worker.says("the coordinator was silent")
        held.coordinator.signal(signal.SIGCONT)
        held.check({0, 1, 2})
    else:
        held.check({1})
