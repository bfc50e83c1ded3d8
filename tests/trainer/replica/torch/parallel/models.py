"""Small models of every family, drawn without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trainer.model.architecture import read_architecture
from trainer.model.families import FAMILIES


def write_drawn_model(folder: Path, model_type: str, **settings: Any) -> Path:
    """Write a model: hidden 128, 2 layers, 4/2 heads of 32, inner 128, 300 tokens, tied.

    The shards of two tensor-parallel ranks are whole blocks of NF4.
    """
    tree: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].causal],
        "model_type": model_type,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 300,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
    }
    if model_type != "qwen2":
        tree["head_dim"] = 32
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tree | settings))
    model = read_architecture(folder)
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model.num_layers)
        for name, shape in model.layer_tensors()
    }
    shapes["model.norm.weight"] = (model.hidden_size,)
    shapes["model.embed_tokens.weight"] = (model.vocab_size, model.hidden_size)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    generator = np.random.default_rng(1)
    weights = {
        # Norms and biases away from ones and zeros, which hide mix-ups.
        name: generator.normal(0.5 if len(shape) == 1 else 0.0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")
    return folder
