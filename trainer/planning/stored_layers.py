"""The layers of a frozen base as they are stored, and the memory that those not resident pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import TrainingSetup
from trainer.planning.term import Term, term

NF4_SCALES = 4 / 64
NF4_BYTES = 0.5 + NF4_SCALES
"""An element in NF4: half a byte, and a fp32 absmax to each block of 64 (arXiv 2305.14314)."""
QLORA = "Dettmers et al., arXiv 2305.14314"
LORA = "Hu et al., arXiv 2106.09685"
FFA_LORA = "Sun et al., arXiv 2403.12313"
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
    stored = 4 if shape.stored in _WIDE else 2
    element = NF4_BYTES if training.method == "qlora" else stored
    return shape.linear_parameters() * element / shape.layers


def passing_layers(shape: ModelShape, training: TrainingSetup) -> Iterator[Term]:
    """Yield the memory that layers pass which are read at each use; nothing if all stay."""
    if training.resident is None:
        return
    yield term(
        "two layers on their way, and a linear in another format",
        "2 * layer + element * linear",
        "Motley: trainer/replica/weights/layer_feed.py",
        layer=layer_bytes(shape, training),
        element=4 if training.on_host else training.precision.activation,
        linear=shape.widest_linear,
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
