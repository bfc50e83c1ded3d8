"""What one process computes, and how far ranks are from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from tests.distributed_ranks import device_of
from tests.trainer.replica.driving import drawn_weights, gradient
from trainer.config.parallel import ParallelConfig, PipelineConfig
from trainer.config.run import RunConfig, load_config
from trainer.data.tokens import Encoded
from trainer.model.layout import GradientLayout, build_layout
from trainer.replica.torch.batch import IGNORED
from trainer.replica.torch.replica import TorchReplica

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.replica.torch.parallel.replica import ParallelReplica

# Only ranks import the rest: every process that collects tests imports this module.

CLASSES = 5


def run_config(folder: str, settings: dict[str, Any]) -> RunConfig:
    """Return a config of a causal-lm run with dotted settings over it."""
    overrides: dict[str, Any] = {
        "model.path": folder,
        "data.train": "train.jsonl",
        "task": "causal-lm",
        "training.micro_batch_size": 4,
        **settings,
    }
    if overrides["task"] == "classify":
        overrides["num_classes"] = CLASSES
    return load_config(None, overrides)


def samples(config: RunConfig, count: int, vocabulary: int, seed: int = 0) -> list[Encoded]:
    """Return samples of 3 to 40 tokens."""
    generator = np.random.default_rng(seed)
    batch: list[Encoded] = []
    for index in range(count):
        ids = generator.integers(0, vocabulary, generator.integers(3, 41)).astype(np.int32)
        labels = ids.copy()
        labels[: 1 + index % 3] = IGNORED
        batch.append(Encoded(ids, index % CLASSES if config.task == "classify" else labels))
    return batch


@cache
def mesh_of(stages: int, tensor: int) -> DeviceMesh:
    """Return a mesh over the default group; it opens connections, so one for all tests."""
    from trainer.replica.torch.parallel.mesh import make_mesh

    data = "ddp" if stages > 1 else "fsdp"
    parallel = ParallelConfig(data=data, tensor=tensor, pipeline=PipelineConfig(stages=stages))
    return make_mesh(parallel, dist.get_world_size(), device().type)


def device() -> torch.device:
    """Return this rank's device."""
    gpus = torch.cuda.device_count()
    return torch.device(device_of(dist.get_rank(), dist.get_world_size(), gpus))


def parallel_replica(
    folder: str, settings: dict[str, Any], *, recompute: bool = False
) -> tuple[ParallelReplica, RunConfig]:
    """Return this rank's part of a model with drawn weights."""
    from trainer.replica.torch.parallel.replica import ParallelReplica

    config = run_config(folder, settings)
    replica = ParallelReplica(
        Path(folder),
        config,
        build_layout(Path(folder), config),
        mesh_of(config.parallel.pipeline.stages, config.parallel.tensor),
        device(),
        drawn_weights(Path(folder), config),
        recompute=recompute,
    )
    return replica, config


def alone(
    folder: str,
    settings: dict[str, Any],
    batch: list[Encoded],
    weights: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """Return the mean loss and gradient of a batch by a `TorchReplica`, by default drawn."""
    config = run_config(folder, settings)
    layout = build_layout(Path(folder), config)
    replica = TorchReplica(Path(folder), config, layout, str(device()), threads=1)
    drawn = drawn_weights(Path(folder), config) if weights is None else weights
    replica.write_trainable(drawn)
    flat, result, _ = gradient(replica, batch)
    return result.loss_sum / result.weight, flat / result.weight


def farthest(layout: GradientLayout, mine: np.ndarray, wanted: np.ndarray) -> tuple[str, float]:
    """Return the tensor with the greatest relative distance, and that distance."""
    distances: dict[str, float] = {}
    for slot in layout.iter_tensors():
        a, b = (x[slot.start : slot.stop].astype(np.float64) for x in (mine, wanted))
        assert np.any(b), f"{slot.name}: the wanted values are all zero, and show nothing"
        distances[slot.name] = float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return max(distances.items(), key=lambda item: item[1])
