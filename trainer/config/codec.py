"""The codecs of the exchange: the facts of each, and the names that `exchange.codec` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

Planned = Literal["step", "rounds", ""]
"""Purpose for which planners choose a codec: exchange after each step, of rounds, or none."""


@dataclass(frozen=True)
class CodecKind:
    """Static properties of a codec."""

    made_by: str
    """Its class, below `trainer.exchange.protocol`, whose `id` is its number on the wire."""
    element_bytes: float
    """Bytes of an element of a large tensor."""
    rank: int
    """Planners and `auto` try the lowest first: what costs least of a run's loss is before what is
    smaller."""
    planned: Planned = ""
    """A codec that costs no loss of a run (docs/low-bandwidth.md) may be chosen after each step."""
    is_quantized: bool = True
    """Whether groups of values share a scale: NaN and Inf cannot be encoded and travel as bf16."""
    needs_feedback: bool = False
    """Whether what it drops in outer steps has to be sent later."""
    is_exact: bool = False
    """Whether its bytes are the fp32 values themselves."""
    sums_encoded: bool = False
    """Whether the compiled `bf16_square_sum` reads its bytes as they are."""


CODECS = {
    "fp32": CodecKind("codecs:Fp32", 4, 0, is_quantized=False, is_exact=True),
    "bf16": CodecKind("codecs:Bf16", 2, 1, "step", is_quantized=False, sums_encoded=True),
    "int8": CodecKind("quantized:Int8", 1 + 4 / 256, 2, "step"),
    # Rounds send changes of weights in 4 bits (arXiv 2501.18512).
    "int4": CodecKind("quantized:Int4", 0.5 + 1 / 32, 3, "rounds", needs_feedback=True),
}
"""By name."""
AUTO = "auto"
"""bf16 while a step hides its exchange, else int8: the coordinator measures it."""
FREE = tuple(
    sorted(
        (name for name, kind in CODECS.items() if kind.planned == "step"),
        key=lambda name: CODECS[name].rank,
    )
)
"""Codecs that planners try first, and `auto` takes; from the most bytes down."""


def find_codec(name: str) -> CodecKind:
    """Return the properties of a codec; of `AUTO`, those of the last that it takes.

    Raises:
        ValueError: there is no such codec.
    """
    kind = CODECS.get(FREE[-1] if name == AUTO else name)
    if kind is None:
        raise ValueError(f"codec {name}: unknown; use one of {AUTO}, {', '.join(CODECS)}")
    return kind


def largest_codec(name: str) -> CodecKind:
    """Return the properties of a codec; of `AUTO`, those of the most bytes that it takes."""
    return CODECS[FREE[0]] if name == AUTO else find_codec(name)


def _check_codec(name: str) -> str:
    find_codec(name)
    return name


CodecName = Annotated[str, AfterValidator(_check_codec)]
"""A setting that names a codec."""
