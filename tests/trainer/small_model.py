"""A data file and a small model made from it, for tests that start from a user's files."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.families import FAMILIES
from trainer.init_model import ModelSizes, init_model
from trainer.model.architecture import read_architecture

SIZES = ModelSizes(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=320,
)
DEEP_SIZES = replace(
    SIZES, hidden_size=64, num_layers=6, num_heads=4, head_dim=16, intermediate_size=128
)
"""Sizes of more layers, so that memory decides how many stay, and of widths that NF4 takes."""
DEEP_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 3},
}
"""Other families with their settings for as many layers."""
WORDS = ["rm -rf $dir", "mkdir -p build", "date +%s > stamp", "echo hello", "cp a b && ls"]


def write_data(path: Path, count: int = 40, classes: int = 3) -> Path:
    lines = (
        {"input": f"{WORDS[index % 5]} # {index * 7919 % 1000}", "label": index % classes}
        for index in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_model(folder: Path, data: Path, seed: int = 0, sizes: ModelSizes = SIZES) -> Path:
    return init_model(data, folder, sizes, seed)


def write_family(folder: Path, model: Path, model_type: str, **settings: Any) -> Path:
    """Copy a model with random layers of another family, of its sizes."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    shutil.copytree(model, folder)
    kept = {name: (folder / name).read_bytes() for name in ("generation_config.json",)}
    tree = json.loads((folder / "config.json").read_text())
    own = {**tree, **FAMILIES[model_type], **settings, "model_type": model_type}
    own = {key: value for key, value in own.items() if value is not None}
    del own["architectures"]
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(**own)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name, content in kept.items():
        (folder / name).write_bytes(content)
    return folder


def write_hollow_weights(folder: Path) -> Path:
    """Write weights for a config.json as a hole in a file: a size, and no bytes on the disk."""
    model = read_architecture(folder)
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}": shape
        for layer in range(model.num_layers)
        for name, shape in model.layer_tensors()
    }
    shapes["model.norm.weight"] = (model.hidden_size,)
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not model.tied):
        shapes[name] = (model.vocab_size, model.hidden_size)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
