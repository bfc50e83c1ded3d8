"""Ranks that resume read and send a state in pieces, and take what each of them keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainer.replica.torch.parallel.one_process import parallel_replica
from trainer.optimizer.adamw import TrainState

if TYPE_CHECKING:
    from tests.distributed_ranks import Ranks
    from tests.trainer.replica.torch.parallel.conftest import DrawnModel

HERE = "tests.trainer.run.distributed.test_resume_memory"
PIECE = 10_000
"""Elements: most matrices are sent in several pieces."""


def resumed(folder: str, output: str, settings: dict[str, Any]) -> list[Any]:
    """Return the largest array that a rank makes to resume, a vector's bytes, what is wrong."""
    from trainer.checkpoint.store import CheckpointStore, RunProgress
    from trainer.replica.torch.parallel import flat_vector
    from trainer.run.distributed.optimizer import ParallelAdamW

    replica, config = parallel_replica(folder, {"method": "full", **settings})
    optimizer = ParallelAdamW(
        config.optimizer, replica.layout, replica.parameters, replica.copy_counts
    )
    drawing = np.random.default_rng(0)
    size = replica.layout.size
    state = TrainState(*(drawing.random(size, np.float32) for _ in range(3)), step=2)
    found = None
    if dist.get_rank() == 0:
        store = CheckpointStore(Path(output), replica.layout, config, Path(folder))
        store.save(state.take_snapshot(), RunProgress("run", 2, 0, 8, 0, 0, {}))
        found = store.reopen("run")
    made: list[int] = []
    make = torch.empty

    def counted(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = make(*shape, dtype=dtype)
        made.append(tensor.nbytes)
        return tensor

    # Counted, and not traced: gloo's threads free arrays, and tracemalloc of Python 3.11 cannot be
    # stopped beside them.
    with patch.object(flat_vector, "PIECE", PIECE), patch.object(torch, "empty", counted):
        optimizer.restore(found and found.stored, 2)
    snapshot, wrong = optimizer.snapshot(2, replica), list[str]()
    for vector in ("weights", "first_moment", "second_moment") if snapshot else ():
        if not np.array_equal(getattr(snapshot, vector), getattr(state, vector)):
            wrong.append(vector)
    return [max(made), 4 * size, wrong]


@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel.data": "fsdp"},
        {"parallel.tensor": 2, "parallel.sequence": True},
        {"parallel.pipeline.stages": 2},
    ],
    ids=["fsdp", "tp-sp", "pp"],
)
def test_no_rank_holds_a_whole_vector(
    ranks: Ranks, drawn_model: DrawnModel, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    for largest, vector, wrong in ranks.run(
        f"{HERE}:resumed", drawn_model(), str(tmp_path), strategy
    ):
        assert not wrong
        assert largest < vector / 4, (largest, vector)
