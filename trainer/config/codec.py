"""The codecs of the exchange: the facts of each, and the names that `exchange.codec` takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

Planned = Literal["step", "rounds", "last", ""]
"""What a planner tries a codec for: an exchange after each step, one of rounds, the last resort."""


@dataclass(frozen=True)
class CodecKind:
    """What is known of a codec before its first gradient."""

    made_by: str
    """Its class, below `trainer.exchange.protocol`, whose `id` is its number on the wire. It is
    made without arguments, or of the number in its name and the shapes of a block's tensors."""
    names: Mapping[str, Planned]
    """As users write them."""
    element_bytes: float | Callable[[float], float] | None
    """Of a large tensor, or by the number in the name; None: they follow from its shape."""
    needs_feedback: bool = True
    """Whether what it drops has to be sent later."""
    auto: bool = False
    """Whether `auto` may take it: no loss of a run was seen (docs/low-bandwidth.md)."""
    number: str = ""
    """What its name has after a colon, as a regular expression."""
    adapters: bool = True
    """Whether it suits them: not if their matrices have a low rank already, as its own have."""


CODECS = {
    "fp32": CodecKind("codecs:Fp32", {"fp32": ""}, 4, needs_feedback=False),
    "bf16": CodecKind("codecs:Bf16", {"bf16": "step"}, 2, needs_feedback=False, auto=True),
    "int8": CodecKind("compression.quantized:Int8", {"int8": "step"}, 1 + 4 / 256, auto=True),
    # Rounds send changes of weights in 4 bits (arXiv 2501.18512).
    "int4": CodecKind("compression.quantized:Int4", {"int4": "rounds"}, 0.5 + 1 / 32),
    "topk": CodecKind(
        "compression.topk:TopK",
        {"topk:0.1": "step", "topk:0.01": "last"},
        lambda density: 2 * density + min(1 / 8, 2 * density),  # bf16; a bitmap or 16-bit indices
        number=r"0?\.(?!0+$)([0-4]\d{0,5}|50{0,5})",  # above 0, at most 0.5
    ),
    "powersgd": CodecKind(
        "compression.powersgd:PowerSGD",
        {"powersgd:4": ""},
        None,
        number=r"[1-9]\d?",
        adapters=False,
    ),
}
"""By what a name has before the colon. Planners and `auto` try them in this order: what costs least
of a run's loss is before what is smaller."""
AUTO = "auto"
"""bf16 while a step hides its exchange, else int8: the coordinator measures it."""
PLANNED = {name: use for kind in CODECS.values() for name, use in kind.names.items()}
NAMES = tuple(PLANNED)
"""As users write them; top-k takes other densities and PowerSGD other ranks."""
FREE = tuple(name for kind in CODECS.values() if kind.auto for name in kind.names)
"""What `auto` takes, from the most bytes down."""


@dataclass(frozen=True)
class CodecName:
    """What a name says; `number` is top-k's density, PowerSGD's rank."""

    kind: CodecKind
    number: float | None

    @property
    def element_bytes(self) -> float | None:
        """The bytes of an element of a large tensor; None: they follow from its shape."""
        size = self.kind.element_bytes
        return size(self.number or 0) if callable(size) else size


def read_codec(name: str, lora_rank: int | None = None) -> CodecName:
    """Parse a codec's name.

    Args:
        name: one of `NAMES`, one with another number, or `AUTO`, which is the last that it takes.
        lora_rank: of the adapters that train; None for a full fine-tune.

    Raises:
        ValueError: there is no such codec, or it does not suit adapters.
    """
    before, colon, number = (FREE[-1] if name == AUTO else name).partition(":")
    kind = CODECS.get(before)
    if kind is None or bool(colon) != bool(kind.number) or not re.fullmatch(kind.number, number):
        raise ValueError(f"codec {name}: unknown; use one of {AUTO}, {', '.join(NAMES)}")
    if lora_rank is not None and not kind.adapters:
        raise ValueError(
            f"codec {name}: an adapter's matrices have rank {lora_rank} already, so rank {number}"
            f" is at least {int(number) / lora_rank:.2g} of their numbers; use int8 or topk:0.1, or"
            " method full"
        )
    return CodecName(kind, (float if "." in number else int)(number) if colon else None)


def _known(name: str) -> str:
    read_codec(name)
    return name


KnownCodec = Annotated[str, AfterValidator(_known)]
"""A setting that names a codec."""
