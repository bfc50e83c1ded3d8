"""A replica group as one worker of a run: beside others, and when a member is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.cluster.real_cluster import Bench, Cluster
from tests.cluster.real_process import Process
from tests.waiting import PATIENCE, wait_for
from trainer.run.distributed.group.processes import STALLED
from trainer.system.errors import should_restart

pytestmark = pytest.mark.cluster

GROUP = ("--gpu-backend", "cpu", "--gpus", "0,1", "--strategy", "ddp")
SHARDED = (*GROUP[:-1], "fsdp")
SETTINGS = {"optimizer__learning_rate": 3e-3}


def members_of(worker: Process) -> list[int]:
    """Return the process ids of a group's members."""
    return [child.pid for child in psutil.Process(worker.pid).children()]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not reaped yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def mixed(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a finished run of a group and of a worker on one device.

    That of a group beside a worker on Vulkan is in tests/contracts.
    """
    run = Cluster(bench, tmp_path_factory.mktemp("mixed"), "mixed")
    try:
        run.configure(**SETTINGS)
        run.coordinator(2)
        run.torch_worker(0, *GROUP)
        run.torch_worker(1, "--gpu-backend", "cpu")
        for process in run.processes:
            assert process.wait() == 0, run.logs()
        yield run
    finally:
        run.end()
        print(run.logs())


def test_all_hold_the_same_weights_after_every_step(mixed: Cluster) -> None:
    """F-DP-001, F-DP-002: a group is one worker, whose samples count once."""
    joined = {event["rank"]: event["device"] for event in mixed.events("joined")}
    assert joined == {0: "cpu+cpu (ddp)", 1: "cpu"}
    mixed.check_contracts([0, 1])
    assert len(mixed.events("verified")) >= mixed.step  # hash_every is 1


def test_the_loss_curve_is_that_of_one_process(
    mixed: Cluster, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """F-DP-005."""
    alone = Cluster(bench, tmp_path_factory.mktemp("alone"), "alone")
    try:
        alone.configure(**SETTINGS)
        assert alone.trainer("local", "--gpu-backend", "cpu", "--threads", "1").wait() == 0
        one, all_of_them = (
            np.array([step["loss"] for step in run.records("step")]) for run in (alone, mixed)
        )
        assert np.abs(all_of_them / one - 1).max() < 1e-4
    finally:
        alone.end()


def test_a_lost_member_is_one_lost_worker_which_comes_back(cluster: Cluster) -> None:
    """F-DP-006: killed first, then stopped; the supervisor's part, a start, is the test's."""
    cluster.configure(training__epochs=500)
    coordinator = cluster.coordinator(2)
    cluster.torch_worker(0, "--gpu-backend", "cpu")
    for flags, number, reason in (
        (SHARDED, signal.SIGKILL, "was killed by SIGKILL"),
        (GROUP, signal.SIGSTOP, "has not answered for"),
    ):
        group = cluster.torch_worker(1, *flags)
        group.says("joined as rank 1")
        cluster.wait_step(cluster.step + 2)
        lost = len(cluster.events("lost", rank=1))
        (member,) = members_of(group)
        os.kill(member, number)
        assert should_restart(group.wait())
        assert "Traceback" not in group.text
        (line,) = (line for line in group.text.splitlines() if line.startswith("trainer: "))
        assert line.startswith(f"trainer: rank 1 of the group of 2 (cpu on {os.uname().nodename})")
        assert reason in line
        record = Path(line.rpartition(" its last collectives are in ")[2])
        kinds = {entry["profiling_name"] for entry in json.loads(record.read_bytes())["entries"]}
        assert "gloo:broadcast" in kinds, kinds  # of weights
        assert not is_alive(member)
        wait_for(lambda n=lost: len(cluster.events("lost", rank=1)) > n, "it is lost", cluster)
        cluster.wait_step(cluster.step + 2)  # the run goes on
    known = len(cluster.events("rejoined", rank=1))
    cluster.torch_worker(1, *SHARDED)
    back = wait_for(
        lambda: cluster.events("rejoined", rank=1)[known:], "it comes back once more", cluster
    )[0]
    cluster.wait_step(back["step"] + 2)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert not cluster.events("diverged")
    assert cluster.events("verified")[-1]["ranks"] == [0, 1]


def test_a_group_that_is_stopped_as_a_whole_goes_on(cluster: Cluster) -> None:
    cluster.configure(training__epochs=500)
    coordinator = cluster.coordinator(2)
    cluster.torch_worker(0, "--gpu-backend", "cpu")
    group = cluster.torch_worker(1, *GROUP)
    cluster.wait_step(2)
    os.killpg(group.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    cluster.wait_event("lost", rank=1)
    wait_for(lambda: time.monotonic() > stopped + STALLED + 2, "longer than members may be silent")
    os.killpg(group.pid, signal.SIGCONT)
    cluster.wait_event("rejoined", rank=1)
    cluster.wait_step(cluster.step + 2)
    coordinator.signal(signal.SIGTERM)
    assert coordinator.wait() == 0
    assert group.wait() == 0


def test_a_killed_leader_takes_its_members_along(cluster: Cluster) -> None:
    cluster.configure(training__epochs=500, exchange__lost_after=PATIENCE)
    cluster.coordinator(1)
    group = cluster.torch_worker(0, *GROUP)
    cluster.wait_step(1)
    (member,) = members_of(group)
    group.kill()
    wait_for(lambda: not is_alive(member), "the member has ended", cluster)
    reason = cluster.wait_event("lost", rank=0)["reason"]
    assert "connection" in reason, reason


@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_a_member_without_its_device_ends_the_group_in_one_line(
    cluster: Cluster, backend: str
) -> None:
    flags = ("--gpu-backend", backend, "--gpus", "98,99", "--strategy", "ddp")
    group = cluster.torch_worker(0, *flags)
    assert group.wait() == 2
    lines = [line for line in group.text.splitlines() if line.startswith("trainer: ")]
    assert len(lines) == 1
    assert "the device 9" in lines[0]
    assert "is not available" in lines[0]
    assert "Traceback" not in group.text
