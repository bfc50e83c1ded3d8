"""F-DP-001 and F-DP-005 with a model that transformers' code computes: one process and two workers.

Mixtral is trained in full: its experts are tensors of the layout, and one parameter of the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster.real_cluster import Bench, Cluster
from trainer.config.run import load_config
from trainer.run.composition import roles

if TYPE_CHECKING:
    from tests.conftest import TinyModel

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore"),  # of transformers
]
ALONE = roles.Placement(gpus=[], backend="cpu", threads=1, rank=None, tls_dir=None)


@pytest.mark.long
def test_two_workers_train_a_mixture_of_experts_as_one_process_does(
    bench: Bench, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(tiny_model("mixtral", vocab_size=512), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bench.model / name, folder)
    runs = [Cluster(bench, tmp_path, name) for name in ("alone", "two")]
    settings = {"model__path": str(folder), "training__max_steps": 4, "checkpoint__every": 1}
    try:
        for run in runs:
            run.configure(**settings, exchange__join_deadline=200.0)
        alone, two = runs
        # Here, where transformers is imported already to make the model.
        assert roles.run_local(load_config(alone.run_file), "alone", ALONE) == 0
        two.coordinator(2)
        for rank in range(2):
            two.torch_worker(rank, "--gpu-backend", "cpu")
        for process in two.processes:
            assert process.wait(300) == 0, two.logs()
        two.check_contracts([0, 1])
    finally:
        for run in runs:
            run.end()
            print(run.logs())
    losses = [np.array([step["loss"] for step in run.records("step")]) for run in runs]
    assert np.abs(losses[1] / losses[0] - 1).max() < 1e-4
    saved = [run.output / "checkpoints" / "step-000001" for run in runs]
    mine, theirs = (load_file(path / "optimizer.safetensors")["first_moment"] for path in saved)
    assert np.abs(mine - theirs).max() < 1e-6 * np.abs(theirs).max()
    experts = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert experts in load_file(saved[1] / "model.safetensors")
