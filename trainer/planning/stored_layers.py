"""The layers of a frozen base as they are stored, and the memory that those not resident pass."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import TrainingSetup
from trainer.planning.term import Term, term

NF4_SCALES = 4 / 64
NF4_BYTES = 0.5 + NF4_SCALES
"""An element in NF4: half a byte, and a fp32 absmax to each block of 64 (arXiv 2305.14314)."""
_WIDE = ("F32", "I32")


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
