"""The gradient layout: which trainable tensors there are, and where each lies in one flat vector.

Every member of a run derives the same layout from the same model directory and config, whatever
its backend, and proves it at join by the digest. Shapes on the wire come from here, never from a
payload. Pure: reads config.json and safetensors headers, imports neither torch nor NumPy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainer.config.run import LINEARS, RunConfig
from trainer.model.architecture import Architecture, module_of, read_architecture
from trainer.model.safetensors_headers import TensorHeader, read_headers
from trainer.system.errors import InputError

__all__ = [
    "Block",
    "GradientLayout",
    "TensorHeader",
    "TensorSlot",
    "build_layout",
    "check_stored",
    "read_headers",
    "stored_name",
]

_PEFT_PREFIX = "base_model.model."
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class TensorSlot:
    """One trainable tensor; `start` is its offset in the flat vector, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

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
    """What is exchanged as one piece: a transformer layer, the norm, the head or the embedding."""

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
    def doubled(self) -> GradientLayout:
        """The same blocks twice: a vector, and behind it the second moment of each element.

        The order in which blocks leave is this layout's, not the doubled one's.
        """

        def behind(slot: TensorSlot) -> TensorSlot:
            return TensorSlot(f"second moment of {slot.name}", slot.shape, self.size + slot.start)

        second = (
            Block(
                len(self.blocks) + block.index,
                block.name,
                self.size + block.start,
                self.size + block.stop,
                tuple(map(behind, block.tensors)),
            )
            for block in self.blocks
        )
        return GradientLayout((*self.blocks, *second), self.num_layers)

    def tensors(self) -> Iterator[TensorSlot]:
        """Yield every tensor in flat order."""
        for block in self.blocks:
            yield from block.tensors

    def tensor_at(self, block_index: int, offset: int) -> TensorSlot:
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
    model = read_architecture(model_dir)
    headers = read_headers(model_dir)
    check_stored(model_dir, model, headers, config.num_classes)
    if config.method == "lora":
        _check_rank(model, config)
        tensors = _lora_tensors(model, config)
    else:
        tensors = _full_tensors(model, config.num_classes)
    return _lay_out(tensors, model.num_layers)


def stored_name(headers: Mapping[str, TensorHeader], name: str) -> str | None:
    """Return under which name a directory stores the tensor `name`, or None when it does not.

    A directory saved as a bare model lacks the prefix `model.`.
    """
    name = name.removeprefix(_PEFT_PREFIX)
    for candidate in (name, name.removeprefix("model.")):
        if candidate in headers:
            return candidate
    return None


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
        needed.update(slots)
    for name, shape in needed.items():
        stored = stored_name(headers, name)
        if stored is None:
            if name == "score.weight":
                continue  # a new head is drawn
            raise InputError(f"{model_dir}: {name} is missing from the weights")
        header = headers[stored]
        if header.dtype not in _FLOATS:
            raise InputError(
                f"{header.file}: {name} is stored as {header.dtype}, need one of"
                f" {', '.join(_FLOATS)}"
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


_Tensors = Iterable[tuple[str, list[tuple[str, tuple[int, ...]]]]]


def _check_rank(model: Architecture, config: RunConfig) -> None:
    rank = config.lora.lora_rank
    full = max(min(model.linear_shape(linear)) for linear in config.lora.target_modules)
    if rank > full:
        raise InputError(
            f"lora.lora_rank: {rank:,} is above {full:,}, the full rank of this model's largest"
            " linear that trains; give less, or method full"
        )


def _lora_tensors(model: Architecture, config: RunConfig) -> _Tensors:
    """Yield blocks of PEFT's saved names: an A `[r, in]` and a B `[out, r]` for each target."""
    lora_rank = config.lora.lora_rank
    # The order of the config's list must not matter, so ours is fixed.
    wanted: set[str] = set(config.lora.target_modules)
    targets = [linear for linear in LINEARS if linear in wanted]
    for layer in range(model.num_layers):
        slots: list[tuple[str, tuple[int, ...]]] = []
        for linear in targets:
            rows, columns = model.linear_shape(linear)
            stem = f"{_PEFT_PREFIX}model.layers.{layer}.{module_of(linear)}"
            slots.append((f"{stem}.lora_A.weight", (lora_rank, columns)))
            slots.append((f"{stem}.lora_B.weight", (rows, lora_rank)))
        yield f"layers.{layer}", slots
    if config.num_classes is not None:
        yield "head", [(f"{_PEFT_PREFIX}score.weight", (config.num_classes, model.hidden_size))]


def _full_tensors(model: Architecture, num_classes: int | None) -> _Tensors:
    """Yield blocks of the state-dict names of transformers."""
    for layer in range(model.num_layers):
        stem = f"model.layers.{layer}"
        yield (
            f"layers.{layer}",
            [(f"{stem}.{name}", shape) for name, shape in model.layer_tensors()],
        )
    yield "norm", [("model.norm.weight", (model.hidden_size,))]
    if num_classes is not None:
        yield "head", [("score.weight", (num_classes, model.hidden_size))]
    elif not model.tied:
        yield "head", [("lm_head.weight", (model.vocab_size, model.hidden_size))]
    yield "embedding", [("model.embed_tokens.weight", (model.vocab_size, model.hidden_size))]


def _lay_out(tensors: _Tensors, num_layers: int) -> GradientLayout:
    blocks: list[Block] = []
    offset = 0
    for name, shapes in tensors:
        slots: list[TensorSlot] = []
        start = offset
        for tensor, shape in shapes:
            slots.append(TensorSlot(tensor, shape, offset))
            offset = slots[-1].stop
        blocks.append(Block(len(blocks), name, start, offset, tuple(slots)))
    return GradientLayout(tuple(blocks), num_layers)
