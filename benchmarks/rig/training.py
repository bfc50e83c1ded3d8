"""The training steps that are compared: a small decoder of random weights on random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.rig.random_model import write_model
from trainer.config.run import RunConfig, load_config
from trainer.data.encoder import IGNORED
from trainer.data.tokens import Encoded
from trainer.model.layout import GradientLayout

if TYPE_CHECKING:
    from trainer.replica.torch.replica import TorchReplica

LENGTH = 32
"""Tokens of a sample; all are targets but the first."""
LAYERS, VOCABULARY, HEAD = 4, 256, 16
_A_LAYER = 13
"""Weights of a layer over its squared width: four projections, and three of three times it."""


def write_decoder(folder: Path, megabytes: float) -> Path:
    """Write a model whose fp32 gradient has about that size, in steps of its width."""
    wanted = megabytes * 1e6 / 4
    width = max(1, round((wanted / (LAYERS * _A_LAYER)) ** 0.5 / HEAD)) * HEAD
    folder.mkdir(parents=True)
    sizes = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width // HEAD,
        "num_key_value_heads": width // HEAD,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
    return write_model(folder, sizes, "F32")


def config(model: Path, settings: Mapping[str, object]) -> RunConfig:
    """Return the run config of a training, with dotted settings of its own."""
    plain: dict[str, object] = {
        "task": "causal-lm",
        "method": "full",
        "model.path": str(model),
        "data.train": "none",
        "data.max_seq_len": LENGTH,
        "optimizer.max_grad_norm": 1e9,
        "training.precision": "fp32",
    }
    return load_config(None, plain | dict(settings))


def open_replica(model: Path, config: RunConfig, layout: GradientLayout, rank: int) -> TorchReplica:
    """Return a replica on the CUDA device of its rank, or on one thread of the CPU."""
    import torch

    from trainer.replica.torch.replica import TorchReplica

    device = f"cuda:{rank}" if torch.cuda.device_count() > rank else "cpu"
    return TorchReplica(model, config, layout, device, threads=1)


class RandomSamples:
    """As many samples as are asked for, drawn by their index; stands in for a Dataset."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Encoded:
        ids = np.random.default_rng(index).integers(0, VOCABULARY, LENGTH, dtype=np.int32)
        labels = ids.copy()
        labels[0] = IGNORED  # no token predicts it
        return Encoded(ids, labels)
