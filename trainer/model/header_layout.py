"""The trainable tensors of models that transformers' code computes, from their headers alone.

Which linears a layer has, and in which layers, is read from the names and shapes of the stored
tensors; `families` says what differs from one family to the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.lora import LoraSettings
from trainer.config.run import RunConfig
from trainer.model.expert_parameters import (
    FUSED,
    ROUTED,
    AdaptedParameter,
    adapted_parameters,
    converted_targets,
    find_expert_slice,
    has_fused_rank,
    stacked_parameters,
    targeted_parameters,
)
from trainer.model.families import text_config
from trainer.model.family import Family
from trainer.model.safetensors_headers import TensorHeader, read_config
from trainer.model.tensor_names import (
    HEADS,
    is_ignored,
    is_tied,
    layer_count,
    module_lists,
    module_name,
    stored_family,
)
from trainer.system.errors import InputError

PEFT_PREFIX = "base_model.model."
FLOATS = ("F32", "F16", "BF16")


class NamedTensor(NamedTuple):
    """A trainable tensor."""

    name: str
    """In the files that are written."""
    shape: tuple[int, ...]
    parameter: str = ""
    """The model's parameter that holds it, with others; empty: its own, of the same name."""
    stored: str = ""
    """The stored tensor that it begins as, if that has another name."""


Tensors = Iterable[tuple[str, list[NamedTensor]]]
"""Blocks by name, with their tensors in order."""


@dataclass(frozen=True)
class StoredModel:
    """A model directory's tensors under their names in the model."""

    model_dir: Path
    family: Family
    layers: list[dict[str, tuple[int, ...]]]
    """Shapes of each layer by name below the layer, in the order of names."""
    rest: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])

    def layer_module(self, layer: int) -> str:
        """Return the module of a layer."""
        return f"{self.family.backbone}.{self.family.layers}.{layer}"

    def iter_linears(self, layer: int) -> Iterator[tuple[str, int, int]]:
        """Yield path below the layer, columns in and rows out of each linear."""
        for name, shape in self.layers[layer].items():
            parts = name.split(".")
            if parts.pop() == "weight" and len(shape) == 2 and not ROUTED.intersection(parts):
                rows, columns = reversed(shape) if self.family.transposed else shape
                yield ".".join(parts), columns, rows

    def find_targets(self, lora: LoraSettings) -> list[tuple[int, str, int, int]]:
        """Return layer, path, columns and rows of the linears that get an adapter.

        Raises:
            InputError: a name is none of a linear, or a layer does not exist.
        """
        wanted, layers = lora.target_modules, lora.select_layers(len(self.layers))
        stacked = converted_targets(self.family)  # PEFT takes these names for experts alone
        every = [
            (layer, *found)
            for layer in range(len(self.layers))
            for found in self.iter_linears(layer)
            if found[0].rpartition(".")[2] not in (*stacked, *self.family.unadapted)
        ]
        known = list(dict.fromkeys(path.rpartition(".")[2] for _, path, _, _ in every))
        for name in wanted or ():
            if name in self.family.unadapted:
                raise InputError(
                    f"{self.model_dir}: lora.target_modules: PEFT has no adapter of {name} in"
                    " models of state spaces; leave it out"
                )
            if name not in stacked and not any(
                _ends_with_name(path, name) for _, path, _, _ in every
            ):
                raise InputError(unknown_linear_message(self.model_dir, name, [*known, *stacked]))
        chosen = [
            found
            for found in every
            if found[0] in layers
            and (wanted is None or any(_ends_with_name(found[1], name) for name in wanted))
        ]
        self._refuse_renamed({path for _, path, _, _ in chosen}, {path for _, path, _, _ in every})
        return chosen

    def _refuse_renamed(self, chosen: Collection[str], every: Collection[str]) -> None:
        renamed = {
            path for path in every if not set(self.family.renamed).isdisjoint(path.split("."))
        }
        if not (first := min(renamed.intersection(chosen), default=None)):
            return
        ends = {path.rpartition(".")[2] for path in renamed}
        others = sorted({path.rpartition(".")[2] for path in every} - ends)
        raise InputError(
            f"{self.model_dir}: lora.target_modules: transformers renames {first} of its files when"
            " it loads them, so that no adapter has its name; "
            + (f"name others: {', '.join(others)}" if others else "it has no others")
        )

    def find_target_parameters(self, lora: LoraSettings) -> list[tuple[int, AdaptedParameter]]:
        """Return layer and parameter of the experts and routers that get an adapter.

        Raises:
            InputError: a name is none of theirs, or one of two linears that are stacked as one.
        """
        fused = [name for name, to in converted_targets(self.family).items() if to == FUSED]
        named = lora.target_modules or ()
        for one, other in zip(fused, reversed(fused), strict=True):
            if one in named and other not in named:
                raise InputError(
                    f"{self.model_dir}: lora.target_modules: {one} of experts is stacked with"
                    f" {other}; name both"
                )
        names = targeted_parameters(self.family, lora)
        if lora.target_modules is None and lora.target_parameters is None:
            shapes = [stacked_parameters(self.family, layer) for layer in self.layers]
            names = tuple(
                name
                for name in names
                if any(_ends_with_name(path, name) for of in shapes for path in of)
            )
        adapted = self.find_named_parameters(names)
        layers = set(lora.select_layers(len(self.layers)))
        return [(layer, target) for layer, target in adapted if layer in layers]

    def find_named_parameters(self, names: Collection[str]) -> list[tuple[int, AdaptedParameter]]:
        """Return layer and parameter of the experts and routers whose names end so.

        Raises:
            InputError: none does.
        """
        shapes = [stacked_parameters(self.family, layer) for layer in self.layers]
        every = [
            f"{self.layer_module(number)}.{path}" for number, of in enumerate(shapes) for path in of
        ]
        for name in names:
            if not any(_ends_with_name(path, name) for path in every):
                known = dict.fromkeys(path for layer in shapes for path in layer)
                has = f"it has {', '.join(known)}" if known else "it has no experts"
                raise InputError(
                    f"{self.model_dir}: target_parameters: no parameter {name} of experts or"
                    f" routers ({has})"
                )
        return [
            (number, found)
            for number, layer in enumerate(shapes)
            for found in adapted_parameters(self.layer_module(number), layer, self.family, names)
        ]

    def parameter_rank(self, target: AdaptedParameter, lora: LoraSettings) -> int:
        """Return the rank of a parameter's adapter."""
        return lora.lora_rank * (1 + (target.fused and has_fused_rank(self.family, lora)))


def unknown_linear_message(model_dir: Path, name: str, known: Collection[str]) -> str:
    """Return the error line for a name in `lora.target_modules` that the model does not have."""
    close = get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    return f"{model_dir}: lora.target_modules: no linear {name}{hint} (it has {', '.join(known)})"


def read_stored(model_dir: Path, headers: Mapping[str, TensorHeader]) -> StoredModel:
    """Return what a model directory stores.

    Raises:
        InputError: layers are missing, or a tensor is not stored as floats.
    """
    where, tree = str(model_dir / "config.json"), read_config(model_dir)
    family, tree = stored_family(model_dir, headers), text_config(tree)
    count = layer_count(tree)
    if type(count) is not int or count < 1:
        raise InputError(f"{where}: num_hidden_layers must be a positive integer, got {count!r}")
    inside = re.compile(rf"{re.escape(f'{family.backbone}.{family.layers}.')}(\d+)\.(.+)")
    layers: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    rest: dict[str, tuple[int, ...]] = {}
    for stored in sorted(headers, key=_natural_key):
        name, header = module_name(stored, family), headers[stored]
        if is_ignored(stored, family):
            continue
        if header.dtype not in FLOATS:
            raise InputError(
                f"{header.file}: {name} is stored as {header.dtype}, need one of"
                f" {', '.join(FLOATS)}"
            )
        if found := inside.fullmatch(name):
            if int(found[1]) >= count:
                raise InputError(f"{header.file}: {name}, config.json says {count} layers")
            layers[int(found[1])][found[2]] = header.shape
        else:
            rest[name] = header.shape
    for number, layer in enumerate(layers):
        if not layer:
            stem = f"{family.backbone}.{family.layers}"
            raise InputError(
                f"{model_dir}: {stem}.{number}.* is missing from the weights"
                if family.listed or any(layers)
                else f"{model_dir}: its {count} layers lie in no single list of modules, but in"
                f" {', '.join(sorted(module_lists(headers))) or 'none'}"
            )
    return StoredModel(model_dir, family, layers, rest)


def header_tensors(stored: StoredModel, config: RunConfig) -> Tensors:
    """Yield the blocks of a run: adapters by PEFT's saved names, or all tensors by their own.

    Raises:
        InputError: the model lacks what the config asks for.
    """
    classes = config.num_classes
    if classes is not None and not stored.family.classifier:
        why = (
            "transformers has no classifier of this family"
            if stored.family.listed
            else "of this family language models alone train"
        )
        raise InputError(f"{stored.model_dir}: {why}")
    table = _embedding_shape(stored)
    if config.method == "full":
        head = None if classes is None else NamedTensor("score.weight", (classes, table[1]))
        yield from _full_tensors(stored, head)
        return
    slots: dict[int, list[NamedTensor]] = {}
    rank = config.lora.lora_rank
    for layer, path, columns, rows in stored.find_targets(config.lora):
        stem, found = f"{stored.layer_module(layer)}.{path}", slots.setdefault(layer, [])
        found.append(saved_as(stored.family, f"{stem}.lora_A.weight", (rank, columns)))
        found.append(saved_as(stored.family, f"{stem}.lora_B.weight", (rows, rank)))
    for layer, target in stored.find_target_parameters(config.lora):
        sides = target.factor_shapes(stored.parameter_rank(target, config.lora))
        for side, shape in zip("AB", sides, strict=True):
            named = saved_as(stored.family, f"{target.module}.lora_{side}.weight", shape)
            slots.setdefault(layer, []).append(named)
    for layer, found in sorted(slots.items()):
        yield f"layers.{layer}", found
    embedding = f"{stored.family.backbone}.{stored.family.embedding}"
    whole = iter_whole_tensors(stored.model_dir, config, embedding, table, tied=_is_tied(stored))
    for block, found in whole:
        names = (one.name.removeprefix(PEFT_PREFIX) for one in found)
        saved = (saved_as(stored.family, name, found[0].shape) for name in names)
        yield block, [one._replace(stored=found[0].stored) for one in saved]


def saved_as(family: Family, name: str, shape: tuple[int, ...]) -> NamedTensor:
    """Return a tensor of an adapter as PEFT saves it, by its name in the language model."""
    own, whole = PEFT_PREFIX + name, PEFT_PREFIX + whole_name(family, name)
    return NamedTensor(own, shape) if own == whole else NamedTensor(whole, shape, own)


def whole_name(family: Family, name: str) -> str:
    """Return the name in the whole model of a module or tensor of the language model."""
    owner, _, last = family.inside.rpartition(".")
    if name.startswith(HEADS):  # stands beside the module of embedding, layers and norm
        return f"{owner}.{name}" if last == "model" else name
    return f"{family.inside}.{name.partition('.')[2]}" if family.inside else name


def iter_whole_tensors(
    model_dir: Path, config: RunConfig, embedding: str, table: tuple[int, ...], *, tied: bool
) -> Tensors:
    """Yield what trains whole beside adapters: a classifier's head, and `lora.modules_to_save`.

    Args:
        embedding: its module.
        table: its shape.
        tied: it is the head too. The two then train apart, as in PEFT.

    Raises:
        InputError: the model has no such module.
    """
    classes, wanted = config.num_classes, config.lora.modules_to_save
    rows = embedding.rpartition(".")[2]
    known = (rows,) if classes is not None else ("lm_head", rows)
    for name in wanted:
        if name not in known:
            raise InputError(
                f"{model_dir}: lora.modules_to_save: no module {name} to train whole (it has"
                f" {', '.join(known)})"
            )
    if classes is not None:
        yield "head", [NamedTensor(f"{PEFT_PREFIX}score.weight", (classes, table[1]))]
    elif "lm_head" in wanted:
        begins = f"{embedding}.weight" if tied else ""
        yield "head", [NamedTensor(f"{PEFT_PREFIX}lm_head.weight", table, stored=begins)]
    if rows in wanted:
        yield "embedding", [NamedTensor(f"{PEFT_PREFIX}{embedding}.weight", table)]


def _full_tensors(stored: StoredModel, head: NamedTensor | None) -> Tensors:
    for number, layer in enumerate(stored.layers):
        named = [
            NamedTensor(
                f"{stored.layer_module(number)}.{name}",
                shape,
                _parameter_name(stored, number, name),
            )
            for name, shape in sorted(
                layer.items(), key=lambda item: _sort_key(stored.family, item[0])
            )
        ]
        yield f"layers.{number}", named
    norms = [
        NamedTensor(name, shape)
        for name, shape in stored.rest.items()
        if len(shape) == 1 and not name.startswith(HEADS)
    ]
    yield "norm", norms
    if head is not None:
        yield "head", [head]
    elif not _is_tied(stored):
        found = [
            NamedTensor(name, shape) for name, shape in stored.rest.items() if "lm_head" in name
        ]
        if not found:
            raise InputError(f"{stored.model_dir}: lm_head.weight is missing from the weights")
        yield "head", found
    tables = [
        NamedTensor(name, shape)
        for name, shape in stored.rest.items()
        if len(shape) > 1 and not name.startswith(HEADS)
    ]
    yield "embedding", tables


def _parameter_name(stored: StoredModel, layer: int, name: str) -> str:
    """Return the parameter that holds a tensor of a layer, if its name is another."""
    family = stored.family
    moved = family.parameter_name(name)
    if (place := find_expert_slice(family, name)) is not None:
        moved = place.parameter
    return "" if moved == name else f"{stored.layer_module(layer)}.{moved}"


def _sort_key(family: Family, name: str) -> tuple[Any, ...]:
    """Return the place of a tensor in its layer: experts as transformers stacks them."""
    place = find_expert_slice(family, name)
    if place is None:
        return (0, _natural_key(name))
    owner, _, stacked = place.parameter.rpartition(".")
    return (1, owner, stacked == "down_proj", place.expert, place.part)


def _embedding_shape(stored: StoredModel) -> tuple[int, ...]:
    """Return the shape of the embedding."""
    name = f"{stored.family.backbone}.{stored.family.embedding}.weight"
    if name not in stored.rest:
        raise InputError(
            f"{stored.model_dir}: {name} is missing from the weights"
            if stored.family.listed
            else f"{stored.model_dir}: no single matrix of {stored.family.backbone} has a row for"
            " each of vocab_size tokens, as an embedding has"
        )
    return stored.rest[name]


def _is_tied(stored: StoredModel) -> bool:
    return is_tied(read_config(stored.model_dir), stored.family, stored.rest)


def _ends_with_name(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
