"""One rank's file of a sharded checkpoint: which parts it writes, and writing them by torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def choose_writers(held: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return for each rank the tensors whose part it writes.

    Args:
        held: for each rank, (sizes, starts, bytes) of its part of each tensor it holds.
    """
    holders: dict[tuple[str, str], tuple[int, list[int]]] = {}
    for rank, parts in enumerate(held):
        for name, (sizes, starts, size) in parts.items():
            if size:
                key = name, json.dumps([sizes, starts])
                holders.setdefault(key, (size, []))[1].append(rank)
    chosen: list[list[str]] = [[] for _ in held]
    laden = [0] * len(held)
    for (name, _), (size, ranks) in holders.items():
        writer = min(ranks, key=lambda rank: laden[rank])
        laden[writer] += size
        chosen[writer].append(name)
    return chosen


def locate_part(part: Tensor) -> tuple[list[int], list[int], int]:
    """Return a part's sizes, where it begins in the whole tensor, and its bytes."""
    sizes, starts = list(part.shape), [0] * part.ndim
    if isinstance(part, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            part.shape, part.device_mesh, part.placements
        )
        sizes, starts, part = list(shape), list(offset), part.to_local()
    return sizes, starts, part.numel() * part.element_size()


def start_writing(parts: dict[str, Tensor], folder: Path, rank: int) -> Future[Any]:
    """Copy the parts; return what is done once they are written and synced."""
    writing = async_save(
        parts, storage_writer=RankWriter(folder, rank), planner=_RankPlanner(), no_dist=True
    )
    assert isinstance(writing, Future)
    return writing


class _RankPlanner(DefaultSavePlanner):
    """Plans one rank's parts, which alone are not the whole tensors that torch's own expects."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
        return self.global_plan, self.metadata


class RankWriter(HuggingFaceStorageWriter):
    """Writes one rank's file."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._shard = rank + 1

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the file by the rank, which plans alone."""
        return [replace(plan, storage_data={"shard_index": self._shard}) for plan in plans]


def rank_file_name(rank: int) -> str:
    """Return the name that torch gives a rank's file."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
