"""F-DP-006 with real workers: `--gpus` starts them, and takes back the one that is killed."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from tests.cluster.real_cluster import Cluster
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster


def workers_of(pid: int) -> dict[int, int]:
    """Return the process id of each rank below a coordinator."""
    found: dict[int, int] = {}
    for child in psutil.Process(pid).children(recursive=True):
        command = child.cmdline()
        if "--rank" in command:
            found[int(command[command.index("--rank") + 1])] = child.pid
    return found


@pytest.mark.smoke("kill")
def test_the_readmes_command_line_survives_a_killed_worker(cluster: Cluster) -> None:
    cluster.configure(training__epochs=500)
    bystander = cluster.start("bystander", ["sleep", "1000"])
    coordinator = cluster.coordinator(2, "--gpus", "0,1", "--gpu-backend", "cpu", "--threads", "1")
    cluster.wait_step(5)
    assert cluster.status["state"] == "running"
    before = workers_of(coordinator.pid)
    assert sorted(before) == [0, 1]

    step, killed_at = cluster.step, time.time()
    os.kill(before[1], signal.SIGKILL)
    lost = cluster.wait_event("lost", rank=1)
    committed = wait_for(
        lambda: [s for s in cluster.records("step") if s["time"] >= lost["time"]], "a commit"
    )[0]
    back = cluster.wait_event("rejoined", rank=1)
    cluster.wait_step(back["step"] + 5)
    assert lost["step"] >= step
    assert workers_of(coordinator.pid)[1] != before[1]
    load = os.getloadavg()[0]
    print(
        f"after kill -9: next commit {committed['time'] - killed_at:.2f} s, "
        f"rejoined {back['time'] - killed_at:.2f} s (load {load:.1f})"
    )

    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert not any(psutil.pid_exists(pid) for pid in before.values())
    assert bystander.running
    proof = cluster.events("verified")[-1]
    assert proof["ranks"] == [0, 1]
    assert cluster.status["checkpoint"]["step"] == cluster.step
