"""Samples for replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded

MakeBatch = Callable[..., list[Encoded]]


@pytest.fixture(scope="session")
def make_batch() -> MakeBatch:
    """Return a maker of seeded batches with lengths from 3 to 40 tokens."""

    def make(count: int, task: str = "classify", seed: int = 0) -> list[Encoded]:
        generator = np.random.default_rng(seed)
        batch: list[Encoded] = []
        for index in range(count):
            ids = generator.integers(0, 300, generator.integers(3, 41)).astype(np.int32)
            if task == "classify":
                batch.append(Encoded(ids, index % 5))
            else:
                labels = ids.copy()
                labels[: 1 + index % 3] = IGNORED
                batch.append(Encoded(ids, labels))
        return batch

    return make
