"""Model folders as GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize

from trainer.model.initialization import read_tensor
from trainer.model.safetensors_headers import read_config, read_headers

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}


def write_gguf(
    path: Path,
    model: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    pre: str = "gpt-2",
) -> Path:
    """Write a model folder as one file.

    Args:
        kind: of the matrices; vectors are always F32.
        keys: to add or replace, after the architecture's name where one begins with `ARCH.`; None
            leaves a key out.
        tensors: to add or replace, by their names in the file; None leaves one out.
        pre: the name of the tokenizer's way to cut text.
    """
    config = read_config(model)
    name = config["model_type"]
    heads, dim = config["num_attention_heads"], config["head_dim"]
    described: dict[str, Any] = {
        "general.type": "model",
        "general.name": "a test",
        "general.file_type": 0,
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.attention.head_count": heads,
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.key_length": dim,
        "ARCH.attention.value_length": dim,
        "ARCH.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "ARCH.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "ARCH.vocab_size": config["vocab_size"],
        **described_tokenizer(model, config["vocab_size"], pre),
        **(keys or {}),
    }
    writer = GGUFWriter(path, name)
    for key, value in described.items():
        _add(writer, key.replace("ARCH", name), value)
    names = get_tensor_name_map(ARCHITECTURES[name], config["num_hidden_layers"])
    held: dict[str, np.ndarray] = {}
    for stored, header in read_headers(model).items():
        values = read_tensor(header)
        if name == "llama" and ".q_proj." in stored:
            values = _in_pairs(values, heads)
        if name == "llama" and ".k_proj." in stored:
            values = _in_pairs(values, config["num_key_value_heads"])
        held[str(names.get_name(stored, (".weight", ".bias")))] = values
    for tensor, values in {**held, **(tensors or {})}.items():
        if values is None:
            continue
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(tensor, values)
        else:
            writer.add_tensor(tensor, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def described_tokenizer(model: Path, rows: int, pre: str) -> dict[str, Any]:
    """Return the keys that describe a folder's tokenizer, padded to so many rows."""
    tree = json.loads((model / "tokenizer.json").read_bytes())
    settings = json.loads((model / "tokenizer_config.json").read_bytes())
    numbers = {**tree["model"]["vocab"]}
    kinds = dict.fromkeys(numbers, TokenType.NORMAL)
    for token in tree["added_tokens"]:
        numbers[token["content"]] = token["id"]
        kinds[token["content"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    by_number = {number: token for token, number in numbers.items()}
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(rows)]
    described: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kinds.get(t, TokenType.UNUSED)) for t in tokens],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in tree["model"]["merges"]
        ],
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if token := settings.get(f"{name}_token"):
            described[f"tokenizer.ggml.{key}_token_id"] = numbers[token]
    if settings.get("chat_template"):
        described["tokenizer.chat_template"] = settings["chat_template"]
    return described


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Return rows of queries or keys so that those which turn together are neighbours."""
    halves = values.reshape(heads, 2, -1, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)
