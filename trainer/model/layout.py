"""The gradient layout: which trainable tensors there are, and where each lies in one flat vector.

Every member of a run derives the same layout from the same model directory and config, whatever
its backend, and proves it at join by the digest. Shapes on the wire come from here, never from a
payload. Pure: reads config.json and safetensors headers, imports neither torch nor NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, linear_path, read_architecture
from trainer.model.expert_parameters import AdaptedParameter, converted_targets
from trainer.model.families import find_family
from trainer.model.header_layout import (
    FLOATS,
    PEFT_PREFIX,
    NamedTensor,
    Tensors,
    header_tensors,
    iter_whole_tensors,
    read_stored,
    unknown_linear_message,
    whole_name,
)
from trainer.model.safetensors_headers import TensorHeader, read_config, read_headers
from trainer.model.tensor_names import language_name, outer_names
from trainer.system.errors import InputError

__all__ = [
    "MAGNITUDE",
    "SIDE_A",
    "Block",
    "GradientLayout",
    "TensorHeader",
    "TensorSlot",
    "build_layout",
    "check_stored",
    "frozen_adapters",
    "lay_out_decoder",
    "lay_out_tensors",
    "read_headers",
    "stored_name",
]


SIDE_A = ".lora_A.weight"
"""Ends the name of an adapter's A."""
MAGNITUDE = ".lora_magnitude_vector"
"""Ends the name of DoRA's norms of rows."""


@dataclass(frozen=True)
class TensorSlot:
    """One trainable tensor; `start` is its offset in the flat vector, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    parameter: str = ""
    """The model's parameter that consecutive tensors fill together; empty: the tensor's own."""
    stored: str = ""
    """The stored tensor that it begins as, if that has another name."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Offset of the first element after the tensor."""
        return self.start + self.size


@dataclass(frozen=True)
class Block:
    """The unit of exchange: a transformer layer, the norm, the head or the embedding."""

    index: int
    name: str
    start: int
    stop: int
    tensors: tuple[TensorSlot, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    @cached_property
    def parameters(self) -> tuple[tuple[str, int, int], ...]:
        """Name, start and stop of each parameter of the model, in order."""
        found: list[tuple[str, int, int]] = []
        for slot in self.tensors:
            name, start = slot.parameter or slot.name, slot.start
            if found and found[-1][0] == name:
                start = found.pop()[1]
            found.append((name, start, slot.stop))
        return tuple(found)

    @cached_property
    def is_layer(self) -> bool:
        """Whether this is a transformer layer."""
        return self.name.startswith("layers.")


@dataclass(frozen=True)
class GradientLayout:
    """All blocks: layers 0 to L-1 in order, then norm, head and embedding where trainable."""

    blocks: tuple[Block, ...]
    num_layers: int

    @property
    def size(self) -> int:
        """Elements of the flat vector."""
        return self.blocks[-1].stop

    @cached_property
    def digest(self) -> str:
        """BLAKE2b hex over every block's and tensor's name and shape, in order."""
        tree = [
            [block.name, [[slot.name, list(slot.shape)] for slot in block.tensors]]
            for block in self.blocks
        ]
        text = json.dumps(tree, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()

    @cached_property
    def send_order(self) -> tuple[int, ...]:
        """Block indices as they leave a worker: layers from the last to the first, then the rest.

        Of the rest the embedding is last, since backward reaches it last.
        """
        rest = {block.name: block.index for block in self.blocks if not block.is_layer}
        tail = [rest[name] for name in ("head", "norm", "embedding") if name in rest]
        return (*reversed(range(self.num_layers)), *tail)

    @cached_property
    def with_second_moments(self) -> GradientLayout:
        """The same blocks twice: a vector, and behind it the second moment of each element.

        The order in which blocks leave is this layout's, not the doubled one's.
        """

        def shift_slot(slot: TensorSlot) -> TensorSlot:
            return TensorSlot(f"second moment of {slot.name}", slot.shape, self.size + slot.start)

        second = (
            Block(
                len(self.blocks) + block.index,
                block.name,
                self.size + block.start,
                self.size + block.stop,
                tuple(map(shift_slot, block.tensors)),
            )
            for block in self.blocks
        )
        return GradientLayout((*self.blocks, *second), self.num_layers)

    def iter_tensors(self) -> Iterator[TensorSlot]:
        """Yield every tensor in flat order."""
        for block in self.blocks:
            yield from block.tensors

    def find_tensor(self, block_index: int, offset: int) -> TensorSlot:
        """Return the tensor that holds element `offset` of a block."""
        block = self.blocks[block_index]
        if not 0 <= offset < block.size:
            raise IndexError(f"block {block.name} has {block.size} elements, no offset {offset}")
        return next(slot for slot in block.tensors if block.start + offset < slot.stop)


def build_layout(model_dir: Path, config: RunConfig) -> GradientLayout:
    """Return the layout of a model directory under a run config.

    Raises:
        InputError: the model is missing, damaged, unsupported, or does not fit the config.
    """
    tree = read_config(model_dir)
    family = find_family(tree, str(model_dir / "config.json"))
    family.check_trained(tree["model_type"], str(model_dir), config.method)
    if config.training.pack and not family.packs:
        raise InputError(
            f"{model_dir}: training.pack: its layers would not keep the samples of a row apart;"
            " leave it out"
        )
    headers = read_headers(model_dir)
    if family.code != "motley":
        if config.method == "lora" and config.lora.use_dora:
            raise InputError(
                f"{model_dir}: lora.use_dora: its layers are computed by transformers' code; leave"
                " it out"
            )
        layout = lay_out_tensors(header_tensors(read_stored(model_dir, headers), config))
    else:
        model = read_architecture(model_dir)
        check_stored(model_dir, model, headers, config.num_classes)
        return lay_out_decoder(model_dir, model, config)
    return _finish_layout(layout, config)


def lay_out_decoder(where: Path, model: Architecture, config: RunConfig) -> GradientLayout:
    """Return the layout of a decoder that Motley's own code computes, by its sizes alone.

    Args:
        where: names the model in errors.

    Raises:
        InputError: the config names what it does not have, or a rank above the full one.
    """
    if config.method == "full":
        return lay_out_tensors(_full_tensors(model, config.num_classes))
    return _finish_layout(lay_out_tensors(_lora_tensors(where, model, config)), config)


def _finish_layout(layout: GradientLayout, config: RunConfig) -> GradientLayout:
    if config.method == "lora":
        _check_rank(layout, config)
    return _drop_frozen_factors(layout) if config.freezes_a else layout


def frozen_adapters(model_dir: Path, config: RunConfig) -> tuple[TensorSlot, ...]:
    """Return the A of each adapter if it does not train: `initial_tensor` has its values.

    Raises:
        InputError: see `build_layout`.
    """
    if not config.freezes_a:
        return ()
    whole = build_layout(model_dir, config.with_settings({"lora.freeze_a": False}))
    return tuple(slot for slot in whole.iter_tensors() if slot.name.endswith(SIDE_A))


def adapted_modules(model_dir: Path, config: RunConfig) -> tuple[str, ...]:
    """Return the modules that get an adapter: ends of their names, or the names of transformers'.

    Raises:
        InputError: see `build_layout`.
    """
    tree = read_config(model_dir)
    if find_family(tree, str(model_dir / "config.json")).code == "motley":
        return config.lora.linears
    stored = read_stored(model_dir, read_headers(model_dir))
    found = stored.find_targets(config.lora)
    return tuple(f"{stored.layer_module(layer)}.{path}" for layer, path, _, _ in found)


def adapted_experts(model_dir: Path, config: RunConfig) -> list[tuple[AdaptedParameter, int]]:
    """Return the parameters of experts and routers that get an adapter, and its rank of each.

    Raises:
        InputError: see `build_layout`.
    """
    tree = read_config(model_dir)
    if find_family(tree, str(model_dir / "config.json")).code == "motley":
        return []
    stored = read_stored(model_dir, read_headers(model_dir))
    found = stored.find_target_parameters(config.lora)
    return [(target, stored.parameter_rank(target, config.lora)) for _, target in found]


def adapted_names(model_dir: Path, config: RunConfig) -> frozenset[str]:
    """Return them as PEFT's `target_modules`: those that the config names, or the ends of all."""
    family = find_family(read_config(model_dir), str(model_dir / "config.json"))
    if family.inside or not family.listed:  # others may have linears of the same names elsewhere
        found = adapted_modules(model_dir, config)
        return frozenset(whole_name(family, name) for name in found)
    if config.lora.target_modules is not None:
        return frozenset(config.lora.target_modules) - converted_targets(family).keys()
    # PEFT would take the last part of `list.0` for the layer 0.
    return frozenset(
        name if (last := name.rpartition(".")[2]).isdigit() else last
        for name in adapted_modules(model_dir, config)
    )


def stored_name(headers: Mapping[str, TensorHeader], name: str) -> str | None:
    """Return under which name a directory stores the tensor `name`, or None when it does not.

    A directory saved as a bare model lacks the prefix `model.` or `transformer.`.
    """
    name = language_name(name.removeprefix(PEFT_PREFIX))
    bare = name.removeprefix("model.").removeprefix("transformer.")
    every = (name, bare, *outer_names(name), *outer_names(f"model.{bare}"))
    return next((found for found in every if found in headers), None)


def check_stored(
    model_dir: Path,
    model: Architecture,
    headers: Mapping[str, TensorHeader],
    num_classes: int | None = None,
) -> None:
    """Compare every tensor that the model needs with what the directory holds.

    Args:
        num_classes: of a classifier, whose head may be missing; None for a language model.

    Raises:
        InputError: one is missing, has another shape, or is not stored as floats.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for _, slots in _full_tensors(model, num_classes):
        needed.update((slot.name, slot.shape) for slot in slots)
    for name, shape in needed.items():
        stored = stored_name(headers, name)
        if stored is None:
            if name == "score.weight":
                continue  # a new head is drawn
            raise InputError(f"{model_dir}: {name} is missing from the weights")
        header = headers[stored]
        if header.dtype not in FLOATS:
            raise InputError(
                f"{header.file}: {name} is stored as {header.dtype}, need one of"
                f" {', '.join(FLOATS)}"
            )
        if header.shape != shape:
            if name == "score.weight":
                raise InputError(
                    f"{model_dir}: the model has a head of {header.shape[0]} classes,"
                    f" num_classes is {num_classes}"
                )
            raise InputError(
                f"{header.file}: {name} has shape {list(header.shape)}, config.json says"
                f" {list(shape)}"
            )


def _drop_frozen_factors(layout: GradientLayout) -> GradientLayout:
    def keep_trainable(block: Block) -> list[NamedTensor]:
        slots = (slot for slot in block.tensors if not slot.name.endswith(SIDE_A))
        return [NamedTensor(slot.name, slot.shape, slot.parameter, slot.stored) for slot in slots]

    return lay_out_tensors((block.name, keep_trainable(block)) for block in layout.blocks)


def _check_rank(layout: GradientLayout, config: RunConfig) -> None:
    sides = [
        slot.shape
        for slot in layout.iter_tensors()
        if ".lora_" in slot.name and len(slot.shape) == 2
    ]
    full = max(min(a[1], b[0]) for a, b in zip(sides[::2], sides[1::2], strict=True))
    if (rank := config.lora.lora_rank) > full:
        raise InputError(
            f"lora.lora_rank: {rank:,} is above {full:,}, the full rank of this model's largest"
            " linear that trains; give less, or method full"
        )


def _lora_tensors(model_dir: Path, model: Architecture, config: RunConfig) -> Tensors:
    """Yield blocks of PEFT's saved names: an A `[r, in]` and a B `[out, r]` for each target."""
    lora_rank = config.lora.lora_rank
    if config.lora.target_parameters:
        raise InputError(
            f"{model_dir}: lora.target_parameters: it has no experts; name its linears in"
            " lora.target_modules"
        )
    # The order of the config's list must not matter, so ours is fixed.
    wanted = config.lora.linears
    for name in wanted:
        if name not in LINEARS:
            raise InputError(unknown_linear_message(model_dir, name, LINEARS))
    targets = [linear for linear in LINEARS if linear in wanted]
    for layer in config.lora.select_layers(model.num_layers):
        slots: list[NamedTensor] = []
        for linear in targets:
            rows, columns = model.linear_shape(linear)
            stem = f"{PEFT_PREFIX}model.layers.{layer}.{linear_path(linear)}"
            slots.append(NamedTensor(f"{stem}{SIDE_A}", (lora_rank, columns)))
            slots.append(NamedTensor(f"{stem}.lora_B.weight", (rows, lora_rank)))
            if config.lora.use_dora:
                slots.append(NamedTensor(f"{stem}{MAGNITUDE}", (rows,)))
        yield f"layers.{layer}", slots
    table = model.vocab_size, model.hidden_size
    yield from iter_whole_tensors(model_dir, config, "model.embed_tokens", table, tied=model.tied)


def _full_tensors(model: Architecture, num_classes: int | None) -> Tensors:
    """Yield blocks of the state-dict names of transformers."""
    for layer in range(model.num_layers):
        stem = f"model.layers.{layer}"
        yield (
            f"layers.{layer}",
            [NamedTensor(f"{stem}.{name}", shape) for name, shape in model.layer_tensors()],
        )
    yield "norm", [NamedTensor("model.norm.weight", (model.hidden_size,))]
    if num_classes is not None:
        yield "head", [NamedTensor("score.weight", (num_classes, model.hidden_size))]
    elif not model.tied:
        yield "head", [NamedTensor("lm_head.weight", (model.vocab_size, model.hidden_size))]
    yield (
        "embedding",
        [NamedTensor("model.embed_tokens.weight", (model.vocab_size, model.hidden_size))],
    )


def lay_out_tensors(tensors: Tensors) -> GradientLayout:
    """Return the layout of blocks by name, with their tensors in order."""
    blocks: list[Block] = []
    offset = 0
    for name, shapes in tensors:
        slots: list[TensorSlot] = []
        start = offset
        for tensor in shapes:
            named = tensor.name, tensor.shape, offset, tensor.parameter, tensor.stored
            slots.append(TensorSlot(*named))
            offset = slots[-1].stop
        blocks.append(Block(len(blocks), name, start, offset, tuple(slots)))
    return GradientLayout(tuple(blocks), sum(block.is_layer for block in blocks))
