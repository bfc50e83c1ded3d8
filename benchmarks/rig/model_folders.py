"""Model folders of named shapes with random weights, written once and used again."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rig.random_model import write_model
from trainer.model.safetensors_headers import read_headers
from trainer.system.errors import InputError

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**_QWEN3, **_SMALL, "hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
    "layer": {**_QWEN3, **_SMALL, "num_hidden_layers": 1, "vocab_size": 512},
    "0.6b": {**_QWEN3, **_SMALL, "num_hidden_layers": 28, "vocab_size": 151_936},
    "4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 36,
        "vocab_size": 151_936,
    },
}
"""`config.json` of each: Qwen3-0.6B and 4B, one layer of the former, and one that runs anywhere."""


@contextmanager
def model_folder(models: Path | None, shape: str) -> Iterator[Path]:
    """Give the model folder of a shape in bf16: MODELS/SHAPE, or a temporary one.

    A folder appears when it is complete, and is used again by all that name the same `models`.

    Raises:
        InputError: MODELS/SHAPE is something else.
    """
    if models is None:
        with tempfile.TemporaryDirectory(prefix="motley-model-") as scratch:
            yield write_model(Path(scratch), SHAPES[shape])
        return
    folder = models / shape
    if not folder.exists():
        models.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{shape}-", dir=models))
        try:
            write_model(unfinished, SHAPES[shape]).rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    config = folder / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")) if config.exists() else None
    if found != SHAPES[shape]:
        raise InputError(f"{folder}: not a model folder of the shape {shape}; remove it")
    read_headers(folder)  # refuses weights that were cut off
    yield folder
