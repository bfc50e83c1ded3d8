"""Weights of listed families' layers beside four projections, an MLP and two norms.

Each count is that of the class of transformers, which tests compare without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.model.families import biased_linears
from trainer.model.family import Family
from trainer.planning.shapes import ModelShape

_KEYS = {"q_proj", "k_proj", "v_proj"}


def count_extras(tree: Mapping[str, Any], family: Family, shape: ModelShape) -> int:
    """Return the elements of all layers that a `ModelShape` has no size for; may be negative.

    Args:
        tree: config.json with its class's defaults, its sizes checked.
    """
    types = tree.get("layer_types") or ()
    convolutions = sum(kind == "conv" for kind in types)
    attending = shape.layers - shape.recurrent_layers - convolutions
    heads = 2 * shape.head_dim if shape.normalised_heads else 0
    replaced = shape.attention_parameters + heads
    extras = shape.layers * (family.norms - 2) * shape.hidden + attending * _attention_extras(
        tree, family, shape
    )
    extras += convolutions * (_convolution_extras(tree, shape) - replaced)
    if shape.recurrent_layers:
        extras += shape.recurrent_layers * (_recurrence_extras(tree, shape) - replaced)
    if tree.get("shared_expert_intermediate_size"):
        extras += (shape.layers - shape.dense_layers) * shape.hidden  # its gate
    if family.transposed_experts:  # gpt-oss: biases of experts and router
        extras += shape.layers * shape.experts * (2 * shape.inner + shape.hidden + 1)
    return extras


def _attention_extras(tree: Mapping[str, Any], family: Family, shape: ModelShape) -> int:
    linears = shape.layer_matrices()
    biased = biased_linears(family, tree)
    if not biased and tree.get("attention_bias"):
        biased = frozenset(_KEYS if family.bare_output else {*_KEYS, "o_proj"})
    if tree.get("mlp_bias"):
        biased |= {"gate_proj", "up_proj", "down_proj"} & linears.keys()
    extras = sum(linears[linear][0] for linear in biased)
    if family.norms_all_heads:
        extras += shape.queries + shape.keys - 2 * shape.head_dim
    if family.gated_queries:
        extras += shape.queries * (shape.hidden + ("q_proj" in biased))
    return extras + shape.heads * family.transposed_experts  # gpt-oss: sinks


def _convolution_extras(tree: Mapping[str, Any], shape: ModelShape) -> int:
    width = shape.hidden
    biases = 5 * width if tree.get("conv_bias") else 0
    return 4 * width * width + width * tree.get("conv_L_cache", 3) + biases


def _recurrence_extras(tree: Mapping[str, Any], shape: ModelShape) -> int:
    heads, key_heads, column, key_column = (
        tree.get(f"linear_{key}", 0)
        for key in ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim")
    )
    values = heads * column
    mixed = 2 * key_heads * key_column + values
    linears = shape.hidden * (mixed + 2 * values + 2 * heads)
    return linears + mixed * tree.get("linear_conv_kernel_dim", 4) + 2 * heads + column
