"""Names of stored tensors: which modules of a model hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.model.families import find_family, text_config
from trainer.model.family import Family
from trainer.model.safetensors_headers import TensorHeader, read_config

HEADS = ("lm_head", "score")
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.")
"""How names begin where other parts are named, and the language model as if it were alone."""
_TIE = "tie_word_embeddings"
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("decoder_layers", "num_decoder_layers"),
)
"""The families' names of the number of layers."""
_LAYER_LISTS = ("layers_block_type", "layer_types")
"""Those that name the kind of each layer."""
_NUMBERED = re.compile(r"(.+?)\.(\d{1,6})\.")
"""The list of modules that holds a tensor, and its place."""
_INSIDE = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
    "text_model.model.": "model.",
    "text_model.lm_head.": "lm_head.",
}
"""How names in files begin where the language model has other parts beside it."""
LANGUAGE_KEYS = {f"^{re.escape(prefix)}": own for prefix, own in _INSIDE.items()}
"""The same as patterns, for transformers' `key_mapping`."""


def layer_count(tree: Mapping[str, Any]) -> Any:
    """Return the number of layers as a config.json has it; None if it has none."""
    counts = (tree[key] for key in _LAYER_COUNTS if tree.get(key) is not None)
    if (found := next(counts, None)) is not None:
        return found
    lists: Iterator[Any] = (tree.get(key) for key in _LAYER_LISTS)
    return next((len(found) for found in lists if isinstance(found, list)), None)


def stored_family(model_dir: Path, headers: Mapping[str, TensorHeader]) -> Family:
    """Return the family of a model directory; what the table does not list by the stored names.

    Its layers are the one list of as many modules as config.json says, its embedding the one matrix
    with a row for each token.

    Raises:
        InputError: see `find_family`.
    """
    tree = read_config(model_dir)
    family, tree = find_family(tree, str(model_dir / "config.json")), text_config(tree)
    if family.listed:
        return family
    stem = f"{family.backbone}.{family.layers}.0."
    if not any(module_name(name, family).startswith(stem) for name in headers):
        count = layer_count(tree)
        fitting = [
            path
            for path, places in module_lists(headers).items()
            if "." in path and len(places) == count and max(places) == count - 1
        ]
        if len(fitting) == 1:
            backbone, _, layers = fitting[0].partition(".")
            family = replace(family, backbone=backbone, layers=layers)
    named = {module_name(name, family): header.shape for name, header in headers.items()}
    stem = f"{family.backbone}."
    if f"{stem}{family.embedding}.weight" not in named:
        tables = [
            name.removeprefix(stem).removesuffix(".weight")
            for name, shape in named.items()
            if name.startswith(stem)
            and name.endswith(".weight")
            and len(shape) == 2
            and shape[0] == tree.get("vocab_size")
            and not _NUMBERED.match(name)
        ]
        if len(tables) == 1:
            family = replace(family, embedding=tables[0])
    return family


def module_lists(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the lists of modules in names of tensors, with the places that each has."""
    lists: dict[str, set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(language_name(name)):
            lists.setdefault(found[1], set()).add(int(found[2]))
    return lists


def module_name(stored: str, family: Family) -> str:
    """Return the name of a stored tensor in the model: published files may lack the prefix."""
    name = language_name(stored)
    own = name.startswith((f"{family.backbone}.", *HEADS)) or re.match(family.ignored or "$", name)
    return name if own else f"{family.backbone}.{name}"


def language_name(name: str) -> str:
    """Return the name in the language model of a tensor of one that has other parts beside it."""
    prefix = next(filter(name.startswith, _INSIDE), "")
    return _INSIDE.get(prefix, "") + name.removeprefix(prefix)


def is_tied(tree: Mapping[str, Any], family: Family, names: Iterable[str]) -> bool:
    """Return whether the embedding is the head, too, by a config.json and stored names.

    A class with other parts ties by its own key; if a head is stored, the language model's counts.
    """
    text = {**family.defaults, **text_config(tree)}
    if any(language_name(name).startswith("lm_head.") for name in names):
        return bool(text.get(_TIE))
    stated = [part[_TIE] for part in (text, tree) if part.get(_TIE) is not None]
    return any(stated) or not (stated or family.listed)


def outer_names(name: str) -> Iterator[str]:
    """Yield what a tensor of the language model may be called in one with other parts beside it."""
    for prefix, own in _INSIDE.items():
        if name.startswith(own):
            yield prefix + name.removeprefix(own)


def is_ignored(stored: str, family: Family) -> bool:
    """Return whether a stored tensor is no part of the language model."""
    if family.inside:
        return not _is_of_language_model(stored)
    return bool(family.ignored and re.search(family.ignored, module_name(stored, family)))


def other_parts(names: Iterable[str]) -> list[str]:
    """Return the parts of a model that stand beside its language model, by tensors' names."""
    others = (name for name in names if not _is_of_language_model(name))
    return list(dict.fromkeys(name.removeprefix("model.").partition(".")[0] for name in others))


def _is_of_language_model(name: str) -> bool:
    return name.startswith((*_INSIDE, *_OWN, *HEADS))
