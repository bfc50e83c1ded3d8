"""F-DP-003 with real processes: one NaN halts everyone before the update, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster.real_cluster import Cluster

pytestmark = pytest.mark.cluster


@pytest.mark.smoke("refuse")
def test_a_nan_halts_everyone(cluster: Cluster) -> None:
    coordinator = cluster.coordinator(3)
    workers = [cluster.worker(0), cluster.worker(1, "--nan", "6"), cluster.worker(2)]
    assert [process.wait() for process in (coordinator, *workers)] == [5, 5, 5, 5]
    assert cluster.step == 6  # the seventh was not applied
    status = cluster.status
    assert status["state"] == "failed"
    for text in (status["reason"], *(process.text for process in (coordinator, *workers))):
        for part in ("step 7", "rank 1", "block layers.1", "tensor model.layers.1."):
            assert part in text, (part, text)
    assert "Traceback" not in coordinator.text

    assert cluster.checkpoint.name == "step-000004"
    weights = load_file(cluster.checkpoint / "model.safetensors")
    assert all(np.isfinite(array).all() for array in weights.values())
    again = [cluster.coordinator(3), *(cluster.worker(rank) for rank in range(3))]
    assert [process.wait() for process in again] == [0, 0, 0, 0]
    cluster.check_contracts([0, 1, 2])
