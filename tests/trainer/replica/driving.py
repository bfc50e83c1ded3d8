"""Run a replica and collect what it hands out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.run import RunConfig
from trainer.data.soft_targets import SoftTargets
from trainer.data.tokens import Encoded
from trainer.model.initialization import draw_uniform, initial_weights
from trainer.model.layout import build_layout
from trainer.replica.base import Replica, StepResult
from trainer.replica.torch.replica import TorchReplica

METHODS = [("lora", "none"), ("lora", "nf4"), ("full", "none")]
TASKS = ["classify", "causal-lm"]


def drawn_weights(folder: Path, config: RunConfig) -> np.ndarray:
    """Return initial weights; B of LoRA is drawn too, or A would have no gradient."""
    layout = build_layout(folder, config)
    weights = initial_weights(layout, folder, config)
    for slot in layout.iter_tensors():
        if slot.name.endswith("lora_B.weight"):
            weights[slot.start : slot.stop] = draw_uniform(5, slot.name, slot.size, 0.1)
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


def train(replica: Replica, weights: np.ndarray, batch: Sequence[Encoded]) -> list[Any]:
    """Return what two steps and an evaluation give; weights move by the gradient between."""
    results: list[Any] = []
    for _ in range(2):
        flat, result, order = gradient(replica, batch)
        results += [flat.tobytes(), result.loss_sum, result.ce_sum, order]
        weights = weights - np.float32(0.01) * flat
        replica.write_trainable(weights)
    scores = replica.evaluate([sample for sample in batch if sample.soft is None] or batch)
    return [*results, scores, weights.tobytes()]


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))


def taught(
    batch: Sequence[Encoded], temperature: float = 1.0, seed: int = 0, *, rest: bool = True
) -> list[Encoded]:
    """Return samples with a teacher who names 1 to 6 tokens at each position but the first.

    `rest`: it has a rest beside them.
    """
    rng = np.random.default_rng(seed)
    made: list[Encoded] = []
    for sample in batch:
        counts = np.concatenate([[0], rng.integers(1, 7, len(sample.input_ids) - 1)])
        ids = [rng.choice(300, count, replace=False) for count in counts]
        buckets = [rng.dirichlet(np.ones(count + rest)) for count in counts[1:]]
        named = [p[:count] for p, count in zip(buckets, counts[1:], strict=True)]
        left = np.array([0.0, *(p[-1] * rest for p in buckets)])
        entropy = np.array([0.0, *(-(p * np.log(p)).sum() for p in buckets)])
        soft = SoftTargets(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            ids=np.concatenate(ids).astype(np.int32),
            weights=np.concatenate([np.empty(0), *named]).astype(np.float32),
            rest=left.astype(np.float32),
            entropy=entropy.astype(np.float32),
            temperature=temperature,
        )
        made.append(Encoded(sample.input_ids, sample.labels, soft))
    return made
