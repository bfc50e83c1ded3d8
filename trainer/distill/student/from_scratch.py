"""A new student: the shape of a config.json, a tokenizer's vocabulary, random weights.

Torch-free and deterministic: the same shape, tokenizer and seed give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from trainer.data.tokenizer_folder import load_tokenizer, special_token
from trainer.distill.tokenizer.vocabulary import FILE, tokenizer_size
from trainer.model.architecture import parse_architecture
from trainer.model.families import FAMILIES
from trainer.model.hf_export import (
    MODEL_CONFIG,
    MODEL_FILE,
    iter_file,
    iter_safetensors,
    tokenizer_files,
)
from trainer.model.initialization import random_weights
from trainer.system.errors import InputError
from trainer.system.regular_file import read_file
from trainer.system.storage.new_folder import check_new, write_new

_SPECIAL = ("bos_token", "eos_token", "pad_token")


def list_shapes() -> dict[str, Path]:
    """Return the shipped shapes by name.

    `albor-350m` is the model of https://github.com/paiml/albor: configs/train/pretrain-350m.yaml
    gives the sizes, its model card the 398.5 M parameters in 218 tensors, so the embedding is tied
    and no linear has a bias.
    """
    folder = Path(str(resources.files("trainer.distill"))) / "students"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def fresh_config(shape: str | Path, tokenizer_dir: Path) -> dict[str, Any]:
    """Return the config.json of a new model.

    Args:
        shape: a config.json, or the name of one of `list_shapes()`. The tokenizer's vocabulary
            replaces its own.
        tokenizer_dir: the folder of the model's tokenizer.

    Raises:
        InputError: the shape or the tokenizer cannot be used.
    """
    tree, where = _read_shape(shape)
    family = parse_architecture(tree, where).model_type
    tokenizer = load_tokenizer(tokenizer_dir)
    config = {
        **tree,
        **{f"{name}_id": special_token(tokenizer_dir, tokenizer, name) for name in _SPECIAL},
        "architectures": [FAMILIES[family].causal],
        "vocab_size": tokenizer_size(tokenizer_dir),
        "dtype": "float32",
    }
    config.pop("torch_dtype", None)  # the name before transformers 5
    return config


def fresh_model(shape: str | Path, tokenizer_dir: Path, output: Path, seed: int = 0) -> Path:
    """Write a model folder with random weights and return its path; it appears whole or not at all.

    Raises:
        InputError: see `fresh_config`, or `output` already holds something.
        StorageError: the write failed.
    """
    check_new(output)
    config = fresh_config(shape, tokenizer_dir)
    files: dict[str, Iterable[bytes | memoryview]] = {
        name: iter_file(path) for name, path in tokenizer_files(tokenizer_dir).items()
    }
    if (tokenizer_dir / FILE).is_file():
        files[FILE] = iter_file(tokenizer_dir / FILE)
    special = {f"{name}_id": config[f"{name}_id"] for name in _SPECIAL}
    ends = {name: id for name, id in special.items() if id is not None}
    files["generation_config.json"] = [_format_json(ends)]
    files[MODEL_CONFIG] = [_format_json(config)]
    files[MODEL_FILE] = iter_safetensors(random_weights(config, seed), {"format": "pt"})
    return write_new(output, files)


def _read_shape(shape: str | Path) -> tuple[dict[str, Any], str]:
    path = Path(shape)
    if not path.is_file():
        known = list_shapes()
        if str(shape) not in known:
            raise InputError(
                f"{shape}: no such config.json and no shape of that name"
                f" (shapes: {', '.join(known)})"
            )
        path = known[str(shape)]
    try:
        tree: Any = json.loads(read_file(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected an object, as in a model's config.json")
    return tree, str(path)


def _format_json(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
