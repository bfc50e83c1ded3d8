"""Run a replica and collect what it hands out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.run import RunConfig
from trainer.data.tokens import Encoded
from trainer.model.initialization import initial_weights, uniform
from trainer.model.layout import build_layout
from trainer.replica.base import Replica, StepResult
from trainer.replica.torch.replica import TorchReplica

METHODS = [("lora", "none"), ("lora", "nf4"), ("full", "none")]
TASKS = ["classify", "causal-lm"]


def drawn_weights(folder: Path, config: RunConfig) -> np.ndarray:
    """Return initial weights; B of LoRA is drawn too, or A would have no gradient."""
    layout = build_layout(folder, config)
    weights = initial_weights(layout, folder, config)
    for slot in layout.tensors():
        if slot.name.endswith("lora_B.weight"):
            weights[slot.start : slot.stop] = uniform(5, slot.name, slot.size, 0.1)
    return weights


def start(folder: Path, config: RunConfig, **settings: Any) -> tuple[TorchReplica, np.ndarray]:
    """Return a torch replica and its weights."""
    replica = TorchReplica(folder, config, build_layout(folder, config), threads=1, **settings)
    weights = drawn_weights(folder, config)
    replica.write_trainable(weights)
    return replica, weights


def gradient(
    replica: Replica, batch: Sequence[Encoded], alpha: float | None = None
) -> tuple[np.ndarray, StepResult, list[int]]:
    flat = np.full(replica.layout.size, np.nan, dtype=np.float32)
    order: list[int] = []

    def on_block(index: int, values: np.ndarray) -> None:
        block = replica.layout.blocks[index]
        assert values.dtype == np.float32
        assert values.shape == (block.size,)
        flat[block.start : block.stop] = values
        order.append(index)

    return flat, replica.forward_backward(batch, on_block, alpha), order


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
