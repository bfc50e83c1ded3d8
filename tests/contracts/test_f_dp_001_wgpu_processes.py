"""A run of torch workers and one on Vulkan: one set of weights, one loss curve, one comes back.

The torch workers are a replica group of two processes on the CPU, and one on the CPU or, where it
is, on CUDA. Without a GPU the Vulkan device is Mesa's llvmpipe, which computes the same kernels on
the CPU.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from tests.cluster.real_cluster import STEPS, Bench, Cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("vulkan")]

SETTINGS = {
    "exchange__join_deadline": 250.0,
    "exchange__step_deadline": 250.0,  # on a busy machine a shard on llvmpipe may take seconds
    "optimizer__learning_rate": 3e-3,
}
GROUP = ("--gpus", "0,1", "--strategy", "ddp")


@cache
def backends() -> tuple[str, ...]:
    """Return each rank's."""
    import torch  # not for processes that only collect tests

    return ("cpu", "cuda" if torch.cuda.is_available() else "cpu", "wgpu")


def start(run: Cluster, **settings: object) -> None:
    run.configure(**{**SETTINGS, **settings})
    run.coordinator(len(backends()))
    for rank, backend in enumerate(backends()):
        run.torch_worker(rank, "--gpu-backend", backend, *(GROUP if rank == 0 else ()))


@pytest.fixture(scope="module")
def mixed(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    run = Cluster(bench, tmp_path_factory.mktemp("mixed"), "mixed")
    try:
        start(run)
        for process in run.processes:
            assert process.wait(250) == 0, run.logs()
        yield run
    finally:
        run.end()
        print(run.logs())


def test_all_hold_the_same_weights_after_every_step(mixed: Cluster) -> None:
    joined = {event["rank"]: event["backend"] for event in mixed.events("joined")}
    assert joined == dict(enumerate(backends()))
    mixed.check_contracts([0, 1, 2])
    assert len(mixed.records("step")) == STEPS
    assert len(mixed.events("verified")) >= STEPS  # hash_every is 1


def test_the_loss_curve_is_that_of_one_torch_worker(
    mixed: Cluster, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    alone = Cluster(bench, tmp_path_factory.mktemp("alone"), "alone")
    try:
        alone.configure(**SETTINGS)
        assert alone.trainer("local", "--gpu-backend", "cpu", "--threads", "1").wait(200) == 0
        one, three = (
            np.array([step["loss"] for step in run.records("step")]) for run in (alone, mixed)
        )
        error = np.abs(three / one - 1).max()
        print(f"the loss differs by at most {error:.2e} of it")
        assert error < 1e-2  # the contract, F-DP-005
        if "cuda" not in backends():  # which multiplies in bf16
            assert error < 1e-4, "what fp32 everywhere gives"
    finally:
        alone.end()


@pytest.mark.long
def test_a_killed_wgpu_worker_comes_back(cluster: Cluster) -> None:
    """F-DP-006; the supervisor's part, to start it again, is the test's."""
    start(cluster, training__epochs=500)
    kill_the_last_and_start_it_again(cluster, "--gpu-backend", "wgpu")


@pytest.mark.long
@pytest.mark.needs("cuda")
def test_a_killed_cuda_worker_comes_back(cluster: Cluster) -> None:
    """The same of three unlike workers, of which the one on CUDA is the last."""
    cluster.configure(**SETTINGS, training__epochs=500)
    cluster.coordinator(3)
    for rank, backend in enumerate(("cpu", "wgpu", "cuda")):
        cluster.torch_worker(rank, "--gpu-backend", backend)
    kill_the_last_and_start_it_again(cluster, "--gpu-backend", "cuda")
    joined = {event["rank"]: event["backend"] for event in cluster.events("joined")}
    assert joined == {0: "cpu", 1: "wgpu", 2: "cuda"}


@pytest.mark.swiftshader
@pytest.mark.timeout(900)  # SwiftShader takes minutes to compile the kernels
def test_one_of_two_drivers_is_killed_and_comes_back(cluster: Cluster, two_drivers: str) -> None:
    """Two cards of a host, whose drivers differ in the size of a subgroup."""
    cluster.configure(**SETTINGS, training__epochs=500)
    cluster.coordinator(2)
    flags = [("--gpu-backend", "wgpu", "--gpus", name) for name in ("llvmpipe", "SwiftShader")]
    for rank in (0, 1):
        cluster.torch_worker(rank, *flags[rank], VK_DRIVER_FILES=two_drivers)
    kill_the_last_and_start_it_again(cluster, *flags[1], VK_DRIVER_FILES=two_drivers)
    assert len({event["device"] for event in cluster.events("joined")}) == 2


def kill_the_last_and_start_it_again(cluster: Cluster, *flags: str, **environment: str) -> None:
    """Kill the last worker of a run when all train; all train again, with equal weights."""
    last = len(cluster.processes) - 2  # the first is the coordinator
    wait_for(lambda: cluster.step >= 3, "all joined", cluster, 900)
    cluster.processes[-1].signal(signal.SIGKILL)
    lost = cluster.wait_event("lost", rank=last)
    cluster.torch_worker(last, *flags, **environment)
    back = cluster.wait_event("rejoined", rank=last)
    assert back["step"] >= lost["step"]
    whole = wait_for(
        lambda: [s for s in cluster.records("step") if s["step"] > back["step"] + 2], "steps"
    )[0]
    assert len(whole["worker_samples"]) == last + 1
    cluster.processes[0].signal(signal.SIGTERM)
    assert cluster.processes[0].wait() == 0
    proof = cluster.events("verified")[-1]
    assert proof["ranks"] == list(range(last + 1))
    assert not cluster.events("diverged")
