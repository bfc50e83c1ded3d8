"""Which threads of a run go before others on a busy processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.real_cluster import Cluster
from tests.waiting import wait_for
from trainer.system.process.priority import raise_thread_priority

pytestmark = pytest.mark.cluster


def niceness(pid: int) -> list[int]:
    """Return that of a process's threads, of its first thread first; see proc_pid_stat(5)."""
    # Not by number: those of later threads are lower where the kernel begins again at 1.
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: task.name != str(pid))
    return [int(task.joinpath("stat").read_text().rpartition(")")[2].split()[16]) for task in tasks]


def test_threads_that_exchange_gradients_are_raised_and_no_others(cluster: Cluster) -> None:
    """As far as this user may; the coordinator exchanges in its first thread."""
    with raise_thread_priority() as raised:
        pass
    gate = cluster.folder / "gate"
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, "--gate", f"6:{gate}")
    cluster.wait_event("checkpoint")
    wait_for(lambda: raised in niceness(worker.pid)[1:], "it is connected", cluster)
    first, *others = niceness(coordinator.pid)
    assert (first, set(others)) == (raised, {0}), "a thread of its own writes checkpoints"
    first, *others = niceness(worker.pid)
    assert first == 0, "it computes"
    assert set(others) <= {raised, 0}
    assert others.count(raised) <= 2 or not raised, "asyncio looks up names in another thread"
    gate.touch()
    assert [coordinator.wait(), worker.wait()] == [0, 0]
