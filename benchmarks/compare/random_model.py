"""Model folders of random weights and given sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainer.model.architecture import parse_architecture
from trainer.replica.wgpu.weights.floats import to_bf16


def write_model(folder: Path, tree: dict[str, Any], dtype: Literal["BF16", "F32"] = "BF16") -> Path:
    """Write a model folder of random weights, one tensor in memory at a time.

    Args:
        tree: its config.json; embeddings are tied.
    """
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    shapes = dict(tensors(tree))
    size = {"BF16": 2, "F32": 4}[dtype]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    generator = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = generator.standard_normal(shape, np.float32) * np.float32(0.02)
            values = np.ones(shape, np.float32) if name.endswith("norm.weight") else values
            flat = values.reshape(-1)
            file.write((to_bf16(flat) if dtype == "BF16" else flat).tobytes())
    return folder


def tensors(tree: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a model with tied embeddings."""
    model = parse_architecture(tree, "config.json")
    yield "model.embed_tokens.weight", (model.vocab_size, model.hidden_size)
    for layer in range(model.num_layers):
        for name, shape in model.layer_tensors():
            yield f"model.layers.{layer}.{name}", shape
    yield "model.norm.weight", (model.hidden_size,)
