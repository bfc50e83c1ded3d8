"""Small models in the form in which their publishers give them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

Weights = dict[str, np.ndarray]


def changed(folder: Path, target: Path, change: Callable[[Weights], Weights], **tree: Any) -> Path:
    """Return a copy of a model whose weights and config.json are others."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tree}))
    weights = change(load_file(target / "model.safetensors"))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def as_openai(weights: Weights) -> Weights:
    """Return GPT-2 as it is published: a bare model, with the masks of its layers."""
    masks = {f"h.{n}.attn.bias": np.ones((1, 1, 8, 8), np.float32) for n in range(2)}
    return {name.removeprefix("transformer."): value for name, value in weights.items()} | masks


def as_gemma_3(weights: Weights) -> Weights:
    """Return Gemma 3 as it is published: every part below one of the whole model."""
    inside = {f"language_model.{name}": value for name, value in weights.items()}
    other = np.ones((4, 4), np.float32)
    return {
        **inside,
        "vision_tower.vision_model.head.weight": other,
        "multi_modal_projector.w": other,
    }


def as_one_that_sees(weights: Weights) -> Weights:
    """Return Qwen3.5 as it is published: beside a vision tower, and layers for drafts."""
    inside = {re.sub(r"^model\.", "model.language_model.", n): v for n, v in weights.items()}
    other = np.ones((4, 4), np.float32)
    return {**inside, "model.visual.blocks.0.attn.qkv.weight": other, "mtp.fc.weight": other}
