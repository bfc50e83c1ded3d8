"""A distillation of one worker on Vulkan and one on torch: one set of weights, one loss curve."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.cluster.real_cluster import Bench, Cluster
from trainer.checkpoint.reader import read_run

if TYPE_CHECKING:
    from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter

pytestmark = pytest.mark.cluster

BATCH = 16


@pytest.fixture(scope="module")
def runs(
    vulkan: Adapter, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, Cluster]]:
    """Let the shared small model teach an adapter of itself: torch alone, and both together."""
    folder = tmp_path_factory.mktemp("runs")
    alone, mixed = made = tuple(Cluster(bench, folder, name) for name in ("alone", "mixed"))
    teacher = [sys.executable, "-m", "trainer.cli", "distill", "teacher", str(bench.model)]
    teacher += ["--data", str(bench.validation), "--out", str(folder / "logits"), "--top-k", "8"]
    teacher += ["--max-seq-len", "64", "--dtype", "float32", "--gpu-backend", "cpu"]
    try:
        assert alone.start("teacher", [*teacher, "--threads", "1"]).wait(250) == 0
        for run in made:
            run.configure(
                task="causal-lm",
                num_classes=None,
                method="lora",
                data__train=str(folder / "logits"),
                distillation={"alpha": 0.9, "alpha_final": 0.3},
                training__batch_size=BATCH,
                optimizer__learning_rate=3e-3,
                exchange__join_deadline=250.0,
                exchange__lost_after=250.0,  # a busy machine may stand still for seconds
            )
        local = alone.trainer("local", "--gpu-backend", "cpu", "--threads", "1")
        mixed.coordinator(2)
        mixed.torch_worker(0, "--gpu-backend", "cpu")
        mixed.torch_worker(1, "--gpu-backend", "wgpu")
        for process in (local, *mixed.processes):
            assert process.wait(250) == 0, process.text
        yield alone, mixed
    finally:
        for run in made:
            run.end()
            print(run.logs())


def test_both_hold_the_same_weights_after_every_step(runs: tuple[Cluster, Cluster]) -> None:
    _, mixed = runs
    joined = {event["rank"]: event["backend"] for event in mixed.events("joined")}
    assert joined == {0: "cpu", 1: "wgpu"}
    steps = len(mixed.records("step"))
    assert len(mixed.events("verified")) >= steps > 2  # hash_every is 1
    proof = mixed.events("verified")[-1]
    assert (proof["at_step"], proof["ranks"]) == (steps, [0, 1])
    assert proof["digest"] == read_run(mixed.checkpoint)["weights_digest"]
    assert not mixed.events("diverged")


def test_the_loss_curve_is_that_of_torch_alone(runs: tuple[Cluster, Cluster]) -> None:
    one, both = (np.array([step["loss"] for step in run.records("step")]) for run in runs)
    error = np.abs(both / one - 1).max()
    print(f"the loss differs by at most {error:.2e} of it")
    assert error < 1e-4
