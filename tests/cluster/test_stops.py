"""Ends of all kinds: killed and restarted coordinators, SIGTERM, a taken port, a full disk."""

from __future__ import annotations

import resource
import signal
import time

import numpy as np
import pytest
from real_cluster import STEPS, Cluster, wait_for
from real_process import signal_aside

pytestmark = pytest.mark.cluster

SLOW = ("--seconds", "0.005")


def assert_same_end(interrupted: Cluster, straight: Cluster) -> None:
    """Compare weights and both moments bit by bit."""
    ours, theirs = interrupted.arrays(), straight.arrays()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name].view(np.uint32), theirs[name].view(np.uint32))


def test_kill_9_of_the_coordinator_and_a_restart(cluster: Cluster) -> None:
    """Workers come back by themselves, and the result is that of a run that never stopped."""
    straight = cluster.another("straight")
    for run in (cluster, straight):
        run.configure(training__epochs=2)
    coordinators = [cluster.coordinator(2), straight.coordinator(2)]
    workers = [run.worker(rank, *SLOW) for run in (cluster, straight) for rank in (0, 1)]
    cluster.wait_event("checkpoint", step=8)
    cluster.wait_step(10)
    coordinators[0].kill()
    died_at = cluster.step
    coordinators.append(cluster.coordinator(2))
    resumed = cluster.wait_event("resumed")
    assert resumed["step"] == max(
        event["step"] for event in cluster.events("checkpoint") if event["step"] <= died_at
    )
    codes = [process.wait() for process in (*coordinators[1:], *workers)]
    assert codes == [0] * 6
    for run in (cluster, straight):
        run.check_contracts([0, 1])
    assert_same_end(cluster, straight)


def test_sigterm_saves_and_a_later_start_goes_on(cluster: Cluster) -> None:
    straight = cluster.another("straight")
    first = [straight.coordinator(2), *(straight.worker(rank) for rank in (0, 1))]
    stopped = [cluster.coordinator(2), *(cluster.worker(rank, *SLOW) for rank in (0, 1))]
    cluster.wait_step(5)
    stopped[0].signal(signal.SIGTERM)
    assert [process.wait() for process in stopped] == [0, 0, 0]
    status = cluster.status
    assert status["step"] < STEPS
    assert status["checkpoint"]["step"] == status["step"]
    assert "SIGTERM" in status["reason"]
    again = [cluster.coordinator(2), *(cluster.worker(rank) for rank in (0, 1))]
    assert [process.wait() for process in (*again, *first)] == [0] * 6
    cluster.check_contracts([0, 1])
    assert_same_end(cluster, straight)


def test_sigterm_to_a_worker_lets_it_leave(cluster: Cluster) -> None:
    cluster.configure(training__epochs=2)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    workers[1].signal(signal.SIGTERM)
    assert workers[1].wait() == 0
    assert "SIGTERM" in cluster.wait_event("lost", rank=1)["reason"]
    assert [coordinator.wait(), workers[0].wait()] == [0, 0]
    cluster.check_contracts([0])


def test_sigterm_in_the_moment_before_a_worker_waits_is_not_lost(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(2)  # so the only worker waits for another one
    worker = cluster.worker(0)
    cluster.wait_event("joined", rank=0)
    signal_aside(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0


def test_a_port_in_use(cluster: Cluster) -> None:
    """One line and exit code 2; nothing is started, and the one who has the port goes on."""
    first = cluster.coordinator(1)
    second = cluster.another("second")
    second.port = cluster.port
    refused = second.coordinator(1, "--gpus", "0", "--gpu-backend", "cpu", listening=False)
    assert refused.wait() == 2
    complaint = refused.text.strip().splitlines()[-1]
    assert complaint.startswith(f"trainer: --bind {cluster.address}: ")
    assert "in use" in complaint
    assert "Traceback" not in refused.text
    assert not second.events("joined")
    worker = cluster.worker(0)
    assert [first.wait(), worker.wait()] == [0, 0]


def test_plaintext_stays_on_this_machine(cluster: Cluster) -> None:
    """TEST-NET-1 is no loopback: refused before anything is bound."""
    flags = ("--role", "coordinator", "--bind", "192.0.2.1:9000")
    process = cluster.trainer("coordinator", *flags)
    assert process.wait() == 2
    assert "TLS" in process.text
    assert "Traceback" not in process.text


def small_files_only() -> None:
    """Let this process write 100 kB into a file, less than a checkpoint needs."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def test_a_full_disk_that_is_cleared(cluster: Cluster) -> None:
    """An alarm, training goes on, and the next checkpoint is saved: exit code 0."""
    cluster.configure(training__epochs=2)
    cluster.before = small_files_only
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0, *SLOW)
    alarm = cluster.wait_event("alarm")
    assert "checkpoint not saved" in alarm["reason"]
    wait_for(lambda: cluster.status["reason"] == alarm["reason"], "the status tells the alarm")
    resource.prlimit(
        coordinator.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    cluster.wait_event("checkpoint")
    assert [coordinator.wait(), worker.wait()] == [0, 0]
    assert "ALARM" in coordinator.text
    cluster.check_contracts([0])


def test_a_disk_that_stays_full(cluster: Cluster) -> None:
    """The run comes to its end and says with exit code 6 that its result is not on the disk."""
    cluster.before = small_files_only
    coordinator = cluster.coordinator(1)
    worker = cluster.worker(0)
    assert [coordinator.wait(), worker.wait()] == [6, 0]
    assert cluster.step == STEPS
    assert cluster.status["state"] == "failed"
    assert "checkpoint not saved" in cluster.status["reason"]
    assert not list((cluster.output / "checkpoints").iterdir())


def test_a_coordinator_that_slept_blames_nobody(cluster: Cluster) -> None:
    """It heard nobody while it was stopped, like a laptop that was closed: all may stay."""
    cluster.configure(training__epochs=2, exchange__heartbeat=0.2, exchange__lost_after=2.0)
    coordinator = cluster.coordinator(2)
    workers = [cluster.worker(rank, *SLOW) for rank in (0, 1)]
    cluster.wait_step(3)
    coordinator.signal(signal.SIGSTOP)
    woken = time.monotonic() + 2.7  # more than lost_after, less than the workers' own limit
    wait_for(lambda: time.monotonic() > woken, "time passes")
    coordinator.signal(signal.SIGCONT)
    assert [process.wait() for process in (coordinator, *workers)] == [0, 0, 0]
    assert not cluster.events("lost")
    cluster.check_contracts([0, 1])
