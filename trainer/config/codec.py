"""The codecs of the exchange: the facts of each, and the names that `exchange.codec` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

Planned = Literal["step", "rounds", ""]
"""What a codec is chosen for: an exchange after each step, one of rounds, nothing."""


@dataclass(frozen=True)
class CodecKind:
    """What is known of a codec before its first gradient."""

    made_by: str
    """Its class, below `trainer.exchange.protocol`, whose `id` is its number on the wire."""
    element_bytes: float
    """Of a large tensor."""
    planned: Planned = ""
    """What costs no loss of a run (docs/low-bandwidth.md) may be chosen after each step."""
    needs_feedback: bool = True
    """Whether what it drops has to be sent later."""


CODECS = {
    "fp32": CodecKind("codecs:Fp32", 4, needs_feedback=False),
    "bf16": CodecKind("codecs:Bf16", 2, "step", needs_feedback=False),
    "int8": CodecKind("compression.quantized:Int8", 1 + 4 / 256, "step"),
    # Rounds send changes of weights in 4 bits (arXiv 2501.18512).
    "int4": CodecKind("compression.quantized:Int4", 0.5 + 1 / 32, "rounds"),
}
"""By name. Planners and `auto` try them in this order: what costs least of a run's loss is before
what is smaller."""
AUTO = "auto"
"""bf16 while a step hides its exchange, else int8: the coordinator measures it."""
FREE = tuple(name for name, kind in CODECS.items() if kind.planned == "step")
"""What planners try first, and `auto` takes; from the most bytes down."""


def codec_kind(name: str) -> CodecKind:
    """Return what is known of a codec; of `AUTO`, what is known of the last that it takes.

    Raises:
        ValueError: there is no such codec.
    """
    kind = CODECS.get(FREE[-1] if name == AUTO else name)
    if kind is None:
        raise ValueError(f"codec {name}: unknown; use one of {AUTO}, {', '.join(CODECS)}")
    return kind


def _known(name: str) -> str:
    codec_kind(name)
    return name


KnownCodec = Annotated[str, AfterValidator(_known)]
"""A setting that names a codec."""
