"""The training step that benchmarks of one machine measure: its settings, rows and arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.run import RunConfig, load_config
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.planning.device_models import find_device
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import TrainingSetup
from trainer.planning.time import flops_per_token
from trainer.system.errors import InputError

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "qlora": {"method": "lora", "model.quantization": "nf4"},
    "full": {"method": "full"},
}


def step_config(
    folder: Path, method: str, rows: int, tokens: int, settings: dict[str, Any]
) -> RunConfig:
    """Return the run config of one micro-batch; frozen weights are in bf16, trained ones in fp32.

    Raises:
        InputError: the settings exclude each other.
    """
    dtype = "float32" if method == "full" else "bfloat16"
    return load_config(
        None,
        {
            "model.path": str(folder),
            "model.dtype": dtype,
            "data.train": "none",
            "data.max_seq_len": tokens,
            "task": "causal-lm",
            "training.micro_batch_size": rows,
            **METHODS[method],
            **settings,
        },
    )


def random_rows(vocabulary: int, rows: int, tokens: int, step: int) -> list[Encoded]:
    """Return the rows of a step; all tokens but the first of a row are predicted."""
    drawn = np.random.default_rng(step).integers(1, vocabulary, (rows, tokens), dtype=np.int32)
    labels = drawn.copy()
    labels[:, 0] = IGNORED
    return [Encoded(*pair) for pair in zip(drawn, labels, strict=True)]


def flops_utilization(
    shape: ModelShape, training: TrainingSetup, tokens_per_second: float, device: str, cards: int
) -> float | None:
    """Return MFU, the share of the cards' peak that forward and backward are; None: peak unknown.

    Operations of recomputation do not count (PaLM, arXiv 2204.02311, appendix B).

    Args:
        device: a card's name as its driver reports it.
    """
    try:
        peak = find_device(device).flops
    except InputError:
        return None
    operations = flops_per_token(shape, replace(training, recompute="none")).value
    return tokens_per_second * operations / (cards * peak) if peak else None
