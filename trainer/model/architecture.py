"""The shape of a decoder that Motley's own code computes, as facts from config.json.

Llama, Mistral, Qwen2, Qwen3 and SmolLM3 share it: RMSNorm, rotary attention with grouped keys and
values, SwiGLU. They differ in biases, in Qwen3's normalised queries and keys, and in SmolLM3's
layers without rotation (`trainer.model.families`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.model.config_keys import check_keys
from trainer.model.families import Family, apply_defaults, biased_linears, find_family, text_config
from trainer.model.safetensors_headers import read_config, read_position_count
from trainer.system.errors import InputError


@dataclass(frozen=True)
class Architecture:
    """One decoder; sizes in elements."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """The language-model head is the embedding itself."""
    biased: frozenset[str]
    """The linears that have a bias."""
    normalised_heads: bool
    """Queries and keys pass an RMSNorm each (Qwen3)."""
    unrotated: frozenset[int] = frozenset()
    """Layers without a rotary embedding (SmolLM3)."""

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """Return `[out, in]` of one of `config.LINEARS`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
        }[linear]

    def layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name (below `layers.N.`) and shape of every tensor of a layer, in our order."""
        for linear in LINEARS:
            shape = self.linear_shape(linear)
            yield f"{linear_path(linear)}.weight", shape
            if linear in self.biased:
                yield f"{linear_path(linear)}.bias", shape[:1]
        if self.normalised_heads:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "input_layernorm.weight", (self.hidden_size,)
        yield "post_attention_layernorm.weight", (self.hidden_size,)


def linear_path(linear: str) -> str:
    """Return a linear's path below its layer, such as `self_attn.q_proj`."""
    part = "self_attn" if linear in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"{part}.{linear}"


def read_architecture(model_dir: Path) -> Architecture:
    """Return the architecture of a model directory.

    Raises:
        InputError: no usable config.json, an unsupported architecture, or a quantised model.
    """
    return parse_architecture(read_config(model_dir), str(model_dir / "config.json"))


def read_vocabulary(model_dir: Path) -> int:
    """Return the tokens of a model of any family.

    Raises:
        InputError: no usable config.json, or it does not say.
    """
    size = text_config(read_config(model_dir)).get("vocab_size")
    if type(size) is not int:
        raise InputError(f"{model_dir / 'config.json'}: vocab_size must be a positive integer")
    return size


def read_positions(model_dir: Path) -> int | None:
    """Return a model's maximal sequence length in tokens; None if its config has none.

    Raises:
        InputError: no usable config.json.
    """
    config = read_config(model_dir)
    scaling: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    known = [read_position_count(config)]
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if isinstance(original, int) and isinstance(factor, int | float):
        known.append(int(original * factor))  # YaRN's, which the first may lack
    return max((count for count in known if isinstance(count, int)), default=None)


def fit_length(config: RunConfig, model_dir: Path, *, lowers: bool = False) -> RunConfig:
    """Return the config with a `data.max_seq_len` that the model supports.

    A default that is too long is lowered.

    Args:
        lowers: a given one too; it cuts windows of a teacher's length.

    Raises:
        InputError: the given length is too long.
    """
    length, limit = config.data.max_seq_len, read_positions(model_dir)
    if limit is None or length <= limit:
        return config
    if "max_seq_len" in config.data.model_fields_set and not lowers:
        raise InputError(
            f"data.max_seq_len {length}: {model_dir} has {limit} positions; give at most that"
        )
    data = config.data.model_copy(update={"max_seq_len": limit})
    return config.model_copy(update={"data": data})


_LARGEST = 1 << 28
_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 1 << 16}
"""Bounds of sizes, beyond which a file of some bytes would keep a computer busy."""


def parse_architecture(config: Mapping[str, Any], where: str) -> Architecture:
    """Return the architecture that a config.json describes; `where` names it in errors.

    Raises:
        InputError: a size is missing or wrong, or the architecture is unsupported.
    """
    family = find_family(config, where)
    if family.code != "motley":
        raise InputError(
            f"{where}: layers of {config['model_type']} are computed by transformers' code alone"
        )
    check_keys(config, where)
    config = apply_defaults(config)

    def read_size(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise InputError(f"{where}: {key} must be a positive integer, got {value!r}")
        if value > (most := _MOST.get(key, _LARGEST)):
            raise InputError(f"{where}: {key} {value} is more than a model has ({most:,} at most)")
        return value

    for key in ("rms_norm_eps", "rope_theta"):
        value = config.get(key)
        if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
            raise InputError(f"{where}: {key} must be a number above zero, got {value!r}")
    hidden, heads = read_size("hidden_size"), read_size("num_attention_heads")
    return Architecture(
        model_type=config["model_type"],
        hidden_size=hidden,
        intermediate_size=read_size("intermediate_size"),
        num_layers=read_size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read_size("num_key_value_heads", heads),
        head_dim=read_size("head_dim", hidden // heads),
        vocab_size=read_size("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        biased=biased_linears(family, config),
        normalised_heads=family.normalised_heads,
        unrotated=_find_unrotated_layers(family, config, where, read_size("num_hidden_layers")),
    )


def _find_unrotated_layers(
    family: Family, config: Mapping[str, Any], where: str, layers: int
) -> frozenset[int]:
    if "no_rope_layers" not in family.keys:
        return frozenset()
    rotated = config.get("no_rope_layers")  # a list of ones, and zeros for layers without
    if rotated is None:
        interval = config["no_rope_layer_interval"]
        rotated = [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers:
        raise InputError(f"{where}: no_rope_layers must have an entry for each of {layers} layers")
    return frozenset(layer for layer, turns in enumerate(rotated) if not turns)
