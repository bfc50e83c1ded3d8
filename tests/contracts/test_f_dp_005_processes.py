"""F-DP-004 and F-DP-005 with real workers: devices that are not there, and one to three workers.

The runs are made once for all tests: a torch worker takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster.real_cluster import STEPS, Bench, Cluster
from tests.covering import covering
from trainer.system.process.child import FALLBACK_VARIABLE

pytestmark = pytest.mark.cluster


SETTINGS = {
    "checkpoint__every": 1,  # the first one tells the first gradient
    "exchange__join_deadline": 200.0,  # the first worker waits long for the last one's imports
    "optimizer__learning_rate": 3e-3,
    "training__epochs": 3,
}


@dataclass(frozen=True)
class Runs:
    alone: Cluster
    two: Cluster
    three: Cluster
    """Unequal shares, and a worker each that asked for cuda, wgpu and whatever there is.

    They see no Vulkan driver; a run with one is in test_f_dp_001_wgpu_processes. The first two are
    told what a supervisor tells one that it starts again.
    """

    def __iter__(self) -> Iterator[Cluster]:
        return iter((self.alone, self.two, self.three))


@pytest.fixture(scope="module")
def runs(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    made = Runs(*(Cluster(bench, folder, name) for name in ("alone", "two", "three")))
    try:
        for run in made:
            run.configure(**SETTINGS)
        made.three.configure(**SETTINGS, exchange__split=[5.0, 2.0, 1.0])
        local = made.alone.trainer("local", "--gpu-backend", "cpu", "--threads", "1")
        made.two.coordinator(2)
        made.three.coordinator(3)
        for rank in range(2):
            made.two.torch_worker(rank, "--gpu-backend", "cpu")
        assert local.wait(200) == 0
        for rank, backend in enumerate(("cuda", "wgpu", "auto")):
            again = {} if backend == "auto" else {FALLBACK_VARIABLE: "1"}
            made.three.torch_worker(rank, "--gpu-backend", backend, VK_DRIVER_FILES="none", **again)
        for run in (made.two, made.three):
            for process in run.processes:
                assert process.wait(200) == 0, run.logs()
        yield made
    finally:
        for run in made:
            run.end()
            print(run.logs())


def losses(run: Cluster) -> np.ndarray:
    return np.array([step["loss"] for step in run.records("step")])


@pytest.mark.smoke("one result")
def test_one_two_and_three_workers_have_one_loss_curve(runs: Runs) -> None:
    one = losses(runs.alone)
    assert one[-STEPS:].mean() < one[:STEPS].mean()
    for run in (runs.two, runs.three):
        error = np.abs(losses(run) / one - 1).max()
        print(f"{run.run_id}: the loss differs by at most {error:.2e} of it")
        assert error < 1e-2  # the contract
        assert error < 1e-4  # what equal arithmetic gives, with room to spare


@pytest.mark.smoke("one result")
def test_unequal_shares_give_the_gradient_of_one_worker(runs: Runs) -> None:
    """After the first update the first moment is the gradient, times 1 - beta1."""
    first = load_file(runs.alone.output / "checkpoints" / "step-000001" / "optimizer.safetensors")
    scale = np.abs(first["first_moment"]).max()
    for run in (runs.two, runs.three):
        other = load_file(run.output / "checkpoints" / "step-000001" / "optimizer.safetensors")
        error = np.abs(other["first_moment"] - first["first_moment"]).max() / scale
        print(f"{run.run_id}: the gradient differs by at most {error:.2e} of its largest")
        assert error < 1e-6


@pytest.mark.smoke("one result")
def test_all_hold_the_same_weights_and_every_sample_counts_once(runs: Runs) -> None:
    runs.two.check_contracts([0, 1])
    runs.three.check_contracts([0, 1, 2])
    assert {tuple(s["worker_samples"].values()) for s in runs.three.records("step")} == {(20, 8, 4)}


@pytest.mark.parametrize(("rank", "asked"), [(0, "cuda"), (1, "wgpu")])
def test_f_dp_004_a_backend_that_is_lost_falls_back(runs: Runs, rank: int, asked: str) -> None:
    """It ends in finite output, on a backend that works, and says which and why."""
    worker = runs.three.processes[1 + rank]
    joined = runs.three.events("joined", rank=rank)[0]
    if joined["backend"] == asked:
        pytest.skip(f"needs a machine without {asked}")
    assert f"falling back to {joined['backend']} ({asked}: " in worker.text
    assert np.isfinite(losses(runs.three)).all()


def test_f_dp_004_auto_says_at_the_start_that_there_is_no_gpu(runs: Runs) -> None:
    worker, coordinator = runs.three.processes[3], runs.three.processes[0]
    joined = runs.three.events("joined", rank=2)[0]
    if joined["backend"] != "cpu":
        pytest.skip("needs a machine without cuda")
    assert joined["backend_reason"].startswith("no GPU was found (cuda: ")
    assert "replica on cpu (no GPU was found)" in worker.text
    assert "rank 2 joined: cpu on " in coordinator.text
    assert "worker 2 computed on" not in coordinator.text, "no device failed"


REQUESTS = [
    (("--gpu-backend", "cuda"), "--gpu-backend cuda is not available: cuda: "),
    (("--gpu-backend", "wgpu"), "--gpu-backend wgpu is not available: wgpu: "),
    (("--gpus", "77"), "the device 77 is not available: cuda: "),
    (("--gpus", "0,1"), "--gpus 0,1: one process computes on one device"),
]


@pytest.mark.smoke("refuse")
@pytest.mark.parametrize(
    ("role", "request_", "complaint"),
    covering((role, *request) for request in REQUESTS for role in ("local", "worker")),
)
def test_f_dp_004_what_was_asked_for_is_had_or_refused(
    cluster: Cluster, role: str, request_: tuple[str, ...], complaint: str
) -> None:
    """One line and exit code 2, before anything is written or joined."""
    if role == "worker":
        request_ += ("--role", "worker", "--coordinator", cluster.address)
    process = cluster.trainer(role, *request_, VK_DRIVER_FILES="none", CUDA_VISIBLE_DEVICES="")
    assert process.wait() == 2
    (line,) = [line for line in process.text.splitlines() if line.startswith("trainer: ")]
    assert line.startswith(f"trainer: {complaint}")
    assert "Traceback" not in process.text
    assert not cluster.output.exists()


def test_f_dp_004_a_coordinator_whose_worker_is_refused_ends(cluster: Cluster) -> None:
    flags = ("--gpus", "77", "--threads", "1")
    coordinator = cluster.coordinator(1, *flags, listening=False)
    assert coordinator.wait() == 2
    assert "trainer: the device 77 is not available: cuda: " in coordinator.text
    assert cluster.status["reason"] == "worker 0 cannot start; its error is above"
    assert cluster.status["state"] == "failed"
    assert "Traceback" not in coordinator.text


@pytest.mark.smoke("one result")
def test_the_checkpoint_is_a_model(runs: Runs) -> None:
    """What three workers made can be loaded and gives finite scores."""
    weights = load_file(Path(runs.three.checkpoint) / "model.safetensors")
    assert all(np.isfinite(array).all() for array in weights.values())
    assert "score.weight" in weights
