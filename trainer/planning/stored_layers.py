"""The layers of a frozen base as they are stored, and the memory that those not resident pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.planning.resident_layers import HEAD_STREAMED
from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import TrainingSetup
from trainer.planning.term import Term, term

NF4_SCALES = 4 / 64
NF4_BYTES = 0.5 + NF4_SCALES
"""An element in NF4: half a byte, and a fp32 absmax to each block of 64 (arXiv 2305.14314)."""
QLORA = "Dettmers et al., arXiv 2305.14314"
LORA = "Hu et al., arXiv 2106.09685"
FFA_LORA = "Sun et al., arXiv 2403.12313"
HEAD_ELEMENTS = 1 << 25
"""Elements of a chunk of a head's rows: 64 MiB in bf16."""
_ALIGNED_ROWS = 128
"""Rows of any width that end at an aligned byte of a Vulkan device's memory, in bf16, too."""
_WIDE = ("F32", "I32")


@dataclass(frozen=True)
class DeviceElements:
    """Elements on one device before data parallelism shards them."""

    linears: float
    rest: float
    """Tables, norms, biases, experts that are not in NF4."""
    new: float
    """Parameters of adapters that train, and the head of a classifier."""
    still: float
    """Parameters of adapters that do not train."""
    tables: float = 0
    """Part of `new`: the head and the embedding that train whole."""
    experts: float = 0
    """In NF4, which FSDP does not shard."""

    @property
    def base(self) -> float:
        """All elements of the model."""
        return self.linears + self.rest + self.experts


def layer_bytes(shape: ModelShape, training: TrainingSetup) -> float:
    """Return the bytes of a layer's matrices as they are stored; of unlike layers the mean."""
    return shape.stored_matrices / shape.layers * _matrix_element(shape, training)


def head_bytes(shape: ModelShape) -> int:
    """Return the bytes of a head as it is stored."""
    return shape.table_parameters * _stored_element(shape)


def reads_head(training: TrainingSetup) -> bool:
    """Return whether a language model's head is read in chunks of its rows at each use."""
    is_frozen = training.classes is None and "lm_head" not in training.whole
    return training.resident == HEAD_STREAMED and is_frozen


def split_head(rows: int, columns: int) -> list[slice]:
    """Return the chunks of a head's rows: products with it are those with one after the other.

    They depend on its shape alone, so that one that is read has the bits of one that stays.
    """
    count = max(1, HEAD_ELEMENTS // columns)
    count -= count % _ALIGNED_ROWS if count > _ALIGNED_ROWS else 0
    return [slice(start, min(start + count, rows)) for start in range(0, rows, count)]


def _matrix_element(shape: ModelShape, training: TrainingSetup) -> float:
    return NF4_BYTES if training.method == "qlora" else _stored_element(shape)


def _stored_element(shape: ModelShape) -> int:
    return 4 if shape.stored in _WIDE else 2


def passing_layers(shape: ModelShape, training: TrainingSetup) -> Iterator[Term]:
    """Yield the memory that layers pass which are read at each use; nothing if all stay."""
    if training.resident is None:
        return
    element = 4 if training.on_host else training.precision.activation
    feed = "Motley: trainer/replica/weights/layer_feed.py"
    largest = max(shape.matrices, default=shape.stored_matrices / shape.layers)
    yield term(
        "two layers on their way, and a linear in another format",
        "2 * layer + element * linear",
        feed,
        layer=largest * _matrix_element(shape, training),
        element=element,
        linear=shape.widest_linear,
    )
    if reads_head(training):
        yield term(
            "two chunks of the head on their way, and one in another format",
            "(2 * stored + element) * chunk",
            feed,
            stored=_stored_element(shape),
            element=element,
            chunk=min(shape.table_parameters, HEAD_ELEMENTS),
        )


def frozen_bytes(kept: DeviceElements, training: TrainingSetup, shards: int) -> tuple[Term, ...]:
    """Return the bytes of a base that does not train; NF4 stores its linears.

    FSDP shards NF4's codes; the scales are whole everywhere.
    """
    size = training.precision.frozen
    codes, scales = (0.5, NF4_SCALES) if training.method == "qlora" else (size, 0)
    still = term("A of adapters", "4 * elements", FFA_LORA, elements=kept.still)
    experts = term(
        "experts in NF4", "size * elements", QLORA, size=NF4_BYTES, elements=kept.experts
    )
    return (
        term(
            "frozen linears",
            "elements * (codes / shards + scales)",
            QLORA if training.method == "qlora" else LORA,
            elements=kept.linears,
            codes=codes,
            scales=scales,
            shards=shards,
        ),
        term(
            "frozen tables, norms and experts",
            "elements * size / shards",
            LORA,
            elements=kept.rest,
            size=size,
            shards=shards,
        ),
        *((experts,) if kept.experts else ()),
        *((still,) if training.frozen_a else ()),
    )
