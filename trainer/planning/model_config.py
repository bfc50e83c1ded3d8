"""A model's shape from its files: config.json, or the headers of its weights alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.config.run import load_config
from trainer.model.expert_parameters import ROUTED, converted_targets
from trainer.model.families import (
    FAMILIES,
    apply_defaults,
    biased_linears,
    find_family,
    known_family,
    text_config,
)
from trainer.model.family import Family
from trainer.model.family_refusals import INSEPARABLE
from trainer.model.layout import build_layout
from trainer.model.safetensors_headers import (
    TensorHeader,
    read_config,
    read_headers,
    stored_dtype,
)
from trainer.model.tensor_names import (
    is_ignored,
    is_tied,
    layer_count,
    module_name,
    stored_family,
)
from trainer.planning.shapes import NAMED, ModelShape
from trainer.system.errors import InputError

_HEADS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("decoder_attention_heads", "num_decoder_attention_heads"),
)
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim")
"""Names of the number of attention heads, and of the columns between the MLP's products."""
_ROTATED = ("rope", "rotary", "alibi")
"""Begin keys of models without a table of positions."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The families' names of the number of experts in a layer."""
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
"""Those of the number that a token passes through."""
_PROJECTED = {"q_proj", "k_proj", "v_proj"}


def named_shape(name: str) -> ModelShape:
    """Return a shape by its name.

    Raises:
        InputError: it is unknown; lists the known ones.
    """
    found = NAMED.get(name.lower())
    if found is None:
        raise InputError(f"--shape {name}: unknown; known: {', '.join(NAMED)}")
    return found


def check_trains(config: Mapping[str, Any], name: str, method: str) -> None:
    """Refuse a model that the trainer refuses before it reads weights, with the same words.

    Args:
        config: its config.json.
        name: the model, as errors name it.

    Raises:
        InputError: it does not train by this method.
    """
    family = find_family(config, f"{name}/config.json")
    family.check_trained(str(config["model_type"]), name, method)


def check_folder_trains(folder: Path, name: str, method: str | None) -> None:
    """Check a model's folder by `check_trains`, and weights of an unlisted family by the trainer.

    Without a method or a config.json nothing is checked.

    Raises:
        InputError: it does not train by this method with the default settings.
    """
    if method is None or not (folder / "config.json").is_file():
        return
    tree = read_config(folder)
    check_trains(tree, name, method)
    if not find_family(tree, name).listed and any(folder.glob("*.safetensors")):
        settings = {"model.path": str(folder), "data.train": name, "task": "causal-lm"}
        build_layout(folder, load_config(None, {**settings, "method": method}))


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of a model's folder; parameters are counted where weights lie there.

    Raises:
        InputError: it has neither a usable config.json nor weights.
    """
    weights = any(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        if not weights:
            raise InputError(f"{folder}: no config.json and no *.safetensors; name a model folder")
        return shape_of_headers(read_headers(folder), folder.name)
    tree = read_config(folder)
    shape = parse_shape(tree, str(folder / "config.json"), folder.name)
    if not weights:
        return shape
    headers = _of_language_model(folder, read_headers(folder))
    counted = sum(math.prod(header.shape) for header in headers.values())
    remark = _remark_unknown(text_config(tree))
    return replace(
        shape,
        counted=counted,
        matrices=_count_matrices(folder, headers, shape.layers) if shape.kept is not None else (),
        stored=stored_dtype(headers),
        tied=is_tied(tree, known_family(text_config(tree)), headers),
        remark=remark,
    )


def _of_language_model(
    folder: Path, headers: Mapping[str, TensorHeader]
) -> dict[str, TensorHeader]:
    """Return what of a folder's tensors is loaded: not the parts that see or hear."""
    with suppress(InputError):  # of a family that is planned alone
        family = find_family(read_config(folder), str(folder))
        return {name: found for name, found in headers.items() if not is_ignored(name, family)}
    return dict(headers)


def _count_matrices(
    folder: Path, headers: Mapping[str, TensorHeader], layers: int
) -> tuple[int, ...]:
    """Return the elements of each layer's linears and experts; nothing of unknown names.

    Routers, convolutions and vectors are small, and stay in memory.
    """
    with suppress(InputError):  # of a family that is planned alone
        family = stored_family(folder, headers)
        stem = re.escape(f"{family.backbone}.{family.layers}")
        counts = [0] * layers
        for stored, header in headers.items():
            found = re.match(rf"{stem}\.(\d+)\.(.+)\.(\w+)$", module_name(stored, family))
            if found is None or len(header.shape) < 2 or int(found[1]) >= layers:
                continue
            path = found[2].split(".")
            is_linear = found[3] == "weight" and ROUTED.isdisjoint(path[-2:])
            if (is_linear or len(header.shape) == 3) and "conv" not in path[-1]:
                counts[int(found[1])] += math.prod(header.shape)
        return tuple(counts) if any(counts) else ()
    return ()


def parse_shape(tree: Mapping[str, Any], where: str, name: str) -> ModelShape:
    """Return the shape that a config.json describes; an unknown architecture is read by its sizes.

    Raises:
        InputError: a size is missing or wrong; names its key.
    """
    tree = apply_defaults(text_config(tree))
    kind = str(tree.get("model_type", "unknown"))

    def read_size(*keys: str, default: int | None = None) -> int:
        value: Any = next((tree[key] for key in keys if tree.get(key) is not None), default)
        if isinstance(value, list) and value and all(type(each) is int for each in value):
            value = max(value)  # one for each layer
        if type(value) is not int or value < 0 or (value == 0 and default != 0):
            raise InputError(f"{where}: {keys[0]} must be a positive integer, got {value!r}")
        if value >= 1 << 31:
            raise InputError(f"{where}: {keys[0]} is too large for a model: {value:.3g}")
        return value

    hidden = read_size("hidden_size", "n_embd", "d_model")
    heads = read_size(*_HEADS, default=None if known_family(tree).listed else 1)
    layers = read_size("num_hidden_layers", default=layer_count(tree) or None)
    family = FAMILIES.get(kind)
    gated = _has_gate(tree) if family is None else family.gated
    experts = read_size(*EXPERTS, default=0) or 1
    inner = read_size(*_INNER, default=4 * hidden)
    if tree.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds, and whole multiples
        multiple = read_size("block_multiple_of", default=1)
        factor = tree.get("block_ffn_dim_multiplier")
        factor = float(factor) if isinstance(factor, int | float) else 1.0
        inner = 2 * read_size("block_ff_dim", default=inner) // 3
        inner = multiple * math.ceil(int(factor * inner) / multiple)
    sparse = read_size("moe_intermediate_size", default=inner) if experts > 1 else inner
    shared = read_size("shared_expert_intermediate_size", default=0)
    shared = shared or sparse * read_size("n_shared_experts", default=0)
    types = tree.get("layer_types") or _layer_types(tree, layers)
    if not isinstance(types, list | tuple):
        raise InputError(f"{where}: layer_types must be a list, got {types!r}")
    tree["layer_types"] = types
    for key in ("linear_num_key_heads", "linear_conv_kernel_dim", "conv_L_cache"):
        read_size(key, default=0)
    states = [
        read_size(f"linear_{key}", default=0)
        for key in ("num_value_heads", "key_head_dim", "value_head_dim")
    ]
    shape = ModelShape(
        name=name,
        recurrent_layers=sum(kind == "linear_attention" for kind in types),
        recurrent_columns=states[0] * sum(states[1:]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read_size("num_key_value_heads", default=heads),
        head_dim=read_size("head_dim", default=max(1, hidden // heads)),
        inner=sparse,
        vocab=read_size("vocab_size"),
        gated=gated,
        tied=bool(tree.get("tie_word_embeddings")),
        experts=experts,
        active_experts=read_size(*_ACTIVE, default=1) if experts > 1 else 1,
        dense_layers=read_size("first_k_dense_replace", default=0) if experts > 1 else 0,
        dense_inner=inner if experts > 1 and tree.get("first_k_dense_replace") else 0,
        shared_inner=shared if experts > 1 else 0,
        positions=0
        if gated or any(key.startswith(_ROTATED) for key in tree)
        else read_size("n_positions", "max_position_embeddings", default=0),
        # Of four projections, the MLP, and two norms, which RMSNorm does not have.
        biases=0 if gated else 7 * hidden + inner,
        normalised_heads=family is not None and family.normalised_heads,
        kept=None if (known := known_family(tree)).code == "motley" else known.kept,
        separable=kind not in INSEPARABLE,
        adapts_experts=family is not None and bool(converted_targets(family)),
        in_gguf=family is not None and bool(family.gguf),
        remark=_remark_unknown(tree),
    )
    if family is None or not family.listed or not gated:
        return shape
    if family.code == "motley":
        biased = tuple(sorted(biased_linears(family, tree)))
        biases = sum(shape.layer_matrices()[linear][0] for linear in biased)
        return replace(shape, biases=biases, biased=biased)
    return replace(shape, extras=_count_extras(tree, family, shape))


def _layer_types(tree: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of layers by the keys that older files have; none if they are alike."""
    every, attending = tree.get("full_attention_interval"), tree.get("full_attn_idxs")
    if type(every) is int and every > 0:
        other, kept = "linear_attention", {*range(every - 1, layers, every)}
    elif isinstance(attending, list):
        other, kept = "conv", {*attending}
    else:
        return []
    return ["full_attention" if number in kept else other for number in range(layers)]


def _remark_unknown(tree: Mapping[str, Any]) -> str:
    """Return the remark on an architecture that the table of families does not list, else nothing.

    Rows of families that are not listed serve loading alone: how files name their tensors.
    """
    if known_family(tree).listed:
        return ""
    kind, names = str(tree.get("model_type", "unknown")), tree.get("architectures")
    shown = names[0] if isinstance(names, list) and names else kind
    family, why = known_family(tree), ""
    if family.refused:
        why = f"{kind} is not trained here: {family.refused}; "
    elif family.renamed:
        names = ", ".join(family.renamed)
        why = f"transformers renames linears of {kind} ({names}), and no adapter trains these; "
    return why + (
        f"architecture {shown} is not known here; planned by the sizes of its config alone, which"
        " is an estimate"
    )


def _has_gate(tree: Mapping[str, Any]) -> bool:
    activation = str(tree.get("hidden_act", tree.get("activation_function", "silu")))
    return activation in ("silu", "swish", "swiglu", "geglu")


def shape_of_headers(headers: Mapping[str, TensorHeader], name: str) -> ModelShape:
    """Return the shape that the names and shapes of stored tensors show.

    Raises:
        InputError: they are not named as transformers names a decoder's.
    """
    sizes = {key: header.shape for key, header in headers.items()}

    def shape_of_tensor(*ends: str) -> tuple[int, ...] | None:
        return next((shape for key, shape in sizes.items() if key.endswith(ends)), None)

    table, query, key, inner = (
        shape_of_tensor("embed_tokens.weight"),
        shape_of_tensor("q_proj.weight"),
        shape_of_tensor("k_proj.weight"),
        shape_of_tensor("up_proj.weight"),
    )
    if table is None or query is None or key is None or inner is None:
        raise InputError(
            f"{name}: the tensors' names show no decoder of a known kind; a config.json is needed"
        )
    numbers = [int(found[1]) for one in sizes if (found := re.search(r"layers\.(\d+)\.", one))]
    norm = shape_of_tensor("q_norm.weight")
    head = norm[0] if norm is not None else 128 if query[0] % 128 == 0 else 64
    return ModelShape(
        name=name,
        layers=max(numbers) + 1,
        hidden=table[1],
        heads=max(1, query[0] // head),
        kv_heads=max(1, key[0] // head),
        head_dim=head,
        inner=inner[0],
        vocab=table[0],
        gated=shape_of_tensor("gate_proj.weight") is not None,
        tied=shape_of_tensor("lm_head.weight") is None,
        normalised_heads=norm is not None,
        counted=sum(math.prod(shape) for shape in sizes.values()),
        stored=stored_dtype(headers),
        remark="no config.json: sizes are read from the weights' headers, heads of"
        f" {head} columns are {'known' if norm is not None else 'assumed'}",
    )


def _count_extras(tree: Mapping[str, Any], family: Family, shape: ModelShape) -> int:
    """Return the elements of all layers that a `ModelShape` has no size for; may be negative.

    Such are weights beside four projections, an MLP and two norms. Each count is that of the class
    of transformers, which tests compare without weights.

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
        biased = frozenset(_PROJECTED if family.bare_output else {*_PROJECTED, "o_proj"})
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
