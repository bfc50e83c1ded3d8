"""Clusters of real processes."""

from pathlib import Path

import pytest

from tests.cluster.real_cluster import bench, cluster, shared_memory
from tests.trainer.small_model import write_data, write_model

__all__ = ["bench", "cluster", "shared_memory"]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model for what is never trained; nothing here imports torch to make it."""
    folder = tmp_path_factory.mktemp("small")
    return write_model(folder / "model", write_data(folder / "data.jsonl"))
