"""Distillation as the objective of a run of several workers: LoRA on a folder of teacher logits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster.real_cluster import Bench, Cluster
from trainer.checkpoint.reader import read_run
from trainer.distill.logits.dataset import LogitsFolder

pytestmark = pytest.mark.cluster

BATCH, EPOCHS = 16, 2


@dataclass(frozen=True)
class Lesson:
    logits: LogitsFolder
    alone: Cluster
    two: Cluster
    """Unequal shares."""


@pytest.fixture(scope="module")
def lesson(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lesson]:
    """Let the shared small model teach an adapter of itself, alone and with two workers."""
    folder = tmp_path_factory.mktemp("runs")
    logits = LogitsFolder(folder / "logits")
    made = Lesson(logits, *(Cluster(bench, folder, name) for name in ("alone", "two")))
    command = [sys.executable, "-m", "trainer.cli", "distill", "teacher", str(bench.model)]
    command += ["--data", str(bench.validation), "--out", str(logits.path), "--top-k", "8"]
    command += ["--max-seq-len", "64", "--dtype", "float32", "--gpu-backend", "cpu"]
    command += ["--threads", "1", "--shard-bytes", "1024"]
    try:
        assert made.alone.start("teacher", command).wait(200) == 0
        for run, shares in ((made.alone, "equal"), (made.two, [3.0, 1.0])):
            run.configure(
                task="causal-lm",
                num_classes=None,
                method="lora",
                data__train=str(logits.path),
                data__validation=str(bench.validation),
                distillation={"alpha": 0.9, "alpha_final": 0.1},
                training={"batch_size": BATCH, "epochs": EPOCHS, "pack": True},
                optimizer__learning_rate=3e-3,
                checkpoint__every=1,  # the first one tells the first gradient
                exchange__split=shares,
                exchange__join_deadline=200.0,
            )
        local = made.alone.trainer("local", "--gpu-backend", "cpu", "--threads", "1")
        made.two.coordinator(2)
        for rank in range(2):
            made.two.torch_worker(rank, "--gpu-backend", "cpu")
        for process in (local, *made.two.processes):
            assert process.wait(200) == 0, process.text
        yield made
    finally:
        for run in (made.alone, made.two):
            run.end()
            print(run.logs())


def losses(run: Cluster, kind: str = "step") -> np.ndarray:
    return np.array([record["loss"] for record in run.records(kind)])


def test_one_and_two_workers_have_one_loss_curve(lesson: Lesson) -> None:
    """The share of the divergence changes with the step alone, whoever computes it."""
    one = losses(lesson.alone)
    error = np.abs(losses(lesson.two) / one - 1).max()
    print(f"the loss differs by at most {error:.2e} of it")
    assert error < 1e-4
    # The teacher is the student: nothing diverges at first, and later cross-entropy has most say.
    ce = losses(lesson.alone, "validation")[-1]
    assert one[0] < 0.2 * ce
    assert one[-1] > 0.7 * ce
    assert losses(lesson.two, "validation")[-1] == pytest.approx(ce, rel=1e-4)


def test_unequal_shares_give_the_gradient_of_one_worker(lesson: Lesson) -> None:
    """After the first update the first moment is the gradient, times 1 - beta1."""
    first, other = (
        load_file(run.output / "checkpoints" / "step-000001" / "optimizer.safetensors")
        for run in (lesson.alone, lesson.two)
    )
    scale = np.abs(first["first_moment"]).max()
    error = np.abs(other["first_moment"] - first["first_moment"]).max() / scale
    print(f"the gradient differs by at most {error:.2e} of its largest")
    assert error < 1e-6


def test_all_hold_the_same_weights_and_every_window_counts_once(lesson: Lesson) -> None:
    windows = lesson.logits.description.windows
    assert len(lesson.logits.description.shards) > 4  # more than a worker holds at once
    steps = lesson.two.records("step")
    taken = [
        [at for _, start, stop in step["sample_ranges"] for at in range(start, stop)]
        for step in steps
    ]
    epoch = [list(range(start, min(start + BATCH, windows))) for start in range(0, windows, BATCH)]
    assert taken == epoch * EPOCHS
    proof = lesson.two.events("verified")[-1]
    assert (proof["at_step"], proof["ranks"]) == (len(steps), [0, 1])
    assert proof["digest"] == read_run(lesson.two.checkpoint)["weights_digest"]
    assert not lesson.two.events("diverged")
