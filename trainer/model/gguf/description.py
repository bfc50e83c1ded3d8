"""The description of a model in a GGUF file as config.json.

The keys are those of llama.cpp's gguf.constants; here they are without the architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.model.families import FAMILIES
from trainer.system.errors import InputError
from trainer.system.key_table import KeyTable

_NOT_TEXT = "is not part of a text model that Motley converts; give the original model folder"
_EXPERTS = "makes it a mixture of experts, which is not converted; give the original model folder"
GGUF_KEYS = KeyTable(
    "a GGUF file",
    used=frozenset(
        {
            "block_count",
            "context_length",
            "embedding_length",
            "feed_forward_length",
            "vocab_size",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
            "attention.layer_norm_rms_epsilon",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scaling.original_context_length",
            "tokenizer.chat_template",
            "tokenizer.chat_template.tool_use",
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.add_eos_token",
            "tokenizer.ggml.add_space_prefix",
            "tokenizer.ggml.bos_token_id",
            "tokenizer.ggml.eom_token_id",
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.merges",
            "tokenizer.ggml.model",
            "tokenizer.ggml.padding_token_id",
            "tokenizer.ggml.pre",
            "tokenizer.ggml.scores",
            "tokenizer.ggml.token_type",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.unknown_token_id",
        }
    ),
    harmless=frozenset(
        {
            "rope.scaling.finetuned",
            "tokenizer.chat_templates",
            "tokenizer.ggml.add_sep_token",
            "tokenizer.ggml.fim_mid_token_id",
            "tokenizer.ggml.fim_pad_token_id",
            "tokenizer.ggml.fim_pre_token_id",
            "tokenizer.ggml.fim_rep_token_id",
            "tokenizer.ggml.fim_sep_token_id",
            "tokenizer.ggml.fim_suf_token_id",
            "tokenizer.ggml.mask_token_id",
            "tokenizer.ggml.middle_token_id",
            "tokenizer.ggml.prefix_token_id",
            "tokenizer.ggml.remove_extra_whitespaces",
            "tokenizer.ggml.seperator_token_id",
            "tokenizer.ggml.suffix_token_id",
        }
    ),
    refused={
        "attention.clamp_kqv": _NOT_TEXT,
        "attention.causal": _NOT_TEXT,
        "attention.layer_norm_epsilon": _NOT_TEXT,
        "attention.logit_softcapping": _NOT_TEXT,
        "attention.max_alibi_bias": _NOT_TEXT,
        "attention.scale": _NOT_TEXT,
        "attention.sliding_window": "is not supported; give the original model folder",
        "final_logit_softcapping": _NOT_TEXT,
        "expert_count": _EXPERTS,
        "expert_used_count": _EXPERTS,
        "logit_scale": _NOT_TEXT,
        "pooling_type": _NOT_TEXT,
        "rope.scaling.attn_factor": "is not converted; give the original model folder",
        "split.count": "says that this is one of several files; join them with"
        " `llama-gguf-split --merge`",
        "tokenizer.ggml.precompiled_charsmap": "is not converted; give the original model folder",
    },
)
"""Keys that are read; of `general.*` and `quantize.*` only the architecture and the type count:
they describe the file."""


def find_model_type(metadata: Mapping[str, Any], path: Path) -> str:
    """Return the family of `trainer.model.families` that a file was made of.

    Raises:
        InputError: it is not one that is converted, or the file is no whole model.
    """
    name, kind = metadata.get("general.architecture"), metadata.get("general.type", "model")
    if kind != "model":
        raise InputError(f"{path}: is a GGUF of the type {kind!r}, not a model")
    known = {family.gguf: model_type for model_type, family in FAMILIES.items() if family.gguf}
    if name not in known:
        raise InputError(
            f"{path}: GGUF architecture {name} is not converted (converted: "
            f"{', '.join(sorted(known))}); give the original model folder"
        )
    return known[name]


def checked_keys(metadata: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values by their keys in the table.

    Raises:
        InputError: one would be ignored.
    """
    prefix = f"{metadata['general.architecture']}."
    values = {
        key.removeprefix(prefix): value
        for key, value in metadata.items()
        if not key.startswith(("general.", "quantize.", "GGUF."))
    }
    # Converters write keys that do not apply with a value that switches them off.
    values = {k: v for k, v in values.items() if k not in GGUF_KEYS.refused or v not in (0, None)}
    if refusal := GGUF_KEYS.explain_refusal(values):
        raise InputError(f"{path}: {refusal}")
    return values


def model_config(
    model_type: str, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, Any]:
    """Return config.json, complete but for the dtype.

    Args:
        shapes: of the file's tensors, `[out, in]`, by their names there.

    Raises:
        InputError: a key is missing or describes what is not converted.
    """

    def read_value(key: str) -> Any:
        if key not in values:
            raise InputError(f"{path}: lacks {key}, so this is not a complete GGUF model")
        return values[key]

    def read_size(key: str, default: int | None = None) -> int:
        found = read_value(key) if default is None else values.get(key, default)
        if isinstance(found, list):
            raise InputError(
                f"{path}: {key} differs between layers, which is not converted; give the original"
                " model folder"
            )
        if not isinstance(found, int | np.integer) or not 0 < found < 1 << 31:
            raise InputError(f"{path}: {key} must be a positive integer, got {found!r}")
        return int(found)

    def read_number(key: str, default: float | None = None) -> float:
        found = read_value(key) if default is None else values.get(key, default)
        if not isinstance(found, int | float | np.number) or not 0 < found < math.inf:
            raise InputError(f"{path}: {key} must be a number above zero, got {found!r}")
        return _shortest_decimal(float(found))

    tokens = len(values.get("tokenizer.ggml.tokens", ()))
    for key, found in values.items() if tokens else ():
        if key.endswith("_token_id") and found not in range(tokens):
            raise InputError(f"{path}: {key} is {found!r}, the file has {tokens:,} tokens")
    hidden, heads = read_size("embedding_length"), read_size("attention.head_count")
    dim = read_size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.get(key, dim) != dim:
            raise InputError(
                f"{path}: {key} {values[key]} differs from the head's {dim}, which is not"
                " converted; give the original model folder"
            )
    embedding = shapes.get("token_embd.weight", (0, 0))
    tree: dict[str, Any] = {
        "architectures": [FAMILIES[model_type].causal],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": read_size("feed_forward_length"),
        "num_hidden_layers": read_size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read_size("attention.head_count_kv", heads),
        "head_dim": dim,
        "vocab_size": embedding[0],
        "max_position_embeddings": read_size("context_length"),
        "rms_norm_eps": read_number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": read_number("rope.freq_base", 10000.0),
            **_rope_scaling(values, read_number, read_size, path),
        },
        "tie_word_embeddings": "output.weight" not in shapes,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    family = FAMILIES[model_type]
    for key, tensor in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_down")):
        if key in family.keys and not family.biased:
            tree[key] = f"blk.0.{tensor}.bias" in shapes
    for name in ("bos", "eos"):
        tree[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{name}_token_id")
    tree["pad_token_id"] = values.get("tokenizer.ggml.padding_token_id")
    return tree


def llama3_scaling(factors: np.ndarray, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return Llama 3.1's scaling of rotary frequencies, of which a GGUF has the divisors.

    Args:
        factors: fp32 `[head_dim / 2]`, the tensor `rope_freqs.weight`.

    Raises:
        InputError: they are not such a scaling's.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, dim = config["rope_parameters"]["rope_theta"], config["head_dim"]
    wavelengths = 2 * math.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    # 0 where the wavelength is 8192 or longer, 1 where it is 8192 / 4 or shorter.
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-4):
        raise InputError(
            f"{path}: rope_freqs.weight scales rotary frequencies in a way that is not converted;"
            " give the original model folder"
        )
    return scaling


def end_tokens(values: Mapping[str, Any]) -> Collection[int]:
    """Return the tokens that end a text or a turn."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(values[key] for key in keys if key in values))


def _rope_scaling(
    values: Mapping[str, Any],
    number: Callable[[str], float],
    size: Callable[[str], int],
    path: Path,
) -> dict[str, Any]:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn") or "rope.scaling.factor" not in values:
        raise InputError(
            f"{path}: rope.scaling.type {kind!r} is not converted; give the original model folder"
        )
    scaling = {"rope_type": kind, "factor": number("rope.scaling.factor")}
    if kind == "yarn" and (original := "rope.scaling.original_context_length") in values:
        scaling["original_max_position_embeddings"] = size(original)
    return scaling


def _shortest_decimal(value: float) -> float:
    """Return the shortest decimal that is this fp32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
