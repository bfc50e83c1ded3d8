"""A data file and a small model made from it, for tests that start from a user's files."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.init_model import ModelSizes, init_model

SIZES = ModelSizes(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=320,
)
WORDS = ["rm -rf $dir", "mkdir -p build", "date +%s > stamp", "echo hello", "cp a b && ls"]


def write_data(path: Path, count: int = 40, classes: int = 3) -> Path:
    lines = (
        {"input": f"{WORDS[index % 5]} # {index * 7919 % 1000}", "label": index % classes}
        for index in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_model(folder: Path, data: Path, seed: int = 0) -> Path:
    return init_model(data, folder, SIZES, seed)
