"""fp16 over the exchange: an overflow neither halts the run nor reaches the wire."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cluster.real_cluster import Cluster

pytestmark = pytest.mark.cluster


def steepen(model: Path, factor: float) -> None:
    """Multiply the last norm, so that the gradient to its input is beyond fp16's 65,504."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(factor)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("factor", [3e4])
def test_workers_stay_equal_through_overflows(
    cluster: Cluster, tmp_path: Path, factor: float
) -> None:
    """Two workers in fp16, of which one computes its layers twice."""
    model = tmp_path / "steep"
    shutil.copytree(cluster.bench.model, model)
    steepen(model, factor)
    cluster.bench = replace(cluster.bench, model=model)
    cluster.configure(
        training__precision="fp16", training__max_steps=6, optimizer__learning_rate=1e-6
    )
    cluster.coordinator(2)
    for rank, word in enumerate(("on", "off")):
        flags = ("--gpu-backend", "cpu", "--set", f"training.gradient_checkpointing={word}")
        cluster.torch_worker(rank, *flags)
    for process in cluster.processes:
        assert process.wait(250) == 0, cluster.logs()
    assert "a gradient overflowed in fp16 with loss scale 256" in cluster.logs()
    assert len(cluster.records("step")) == 6
    cluster.check_contracts([0, 1])
    assert not cluster.events("halted")
