"""The names of codecs, as `exchange.codec` takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator

AUTO = "auto"
"""bf16 while a step hides its exchange, else int8: the coordinator measures it."""
NAMES = ("fp32", "bf16", "int8", "int4", "topk:0.1", "topk:0.01", "powersgd:4")
"""As users write them; top-k takes other densities and PowerSGD other ranks."""
_PLAIN = ("fp32", "bf16")
_TOP_K = re.compile(r"topk:(0?\.\d{1,6})")
_POWERSGD = re.compile(r"powersgd:([1-9]\d?)")


@dataclass(frozen=True)
class CodecName:
    """What a name says; `density` is top-k's, `rank` PowerSGD's."""

    kind: str
    density: float = 1.0
    rank: int = 0

    @property
    def needs_feedback(self) -> bool:
        """Whether what it drops has to be sent later: fp32 drops nothing, and bf16 next to it."""
        return self.kind not in _PLAIN


def read_codec(name: str, lora_rank: int | None = None) -> CodecName:
    """Parse a codec's name.

    Args:
        name: `AUTO`, one of `NAMES`, `topk:DENSITY` above 0 and at most 0.5, or `powersgd:RANK`.
        lora_rank: of the adapters that train; None for a full fine-tune.

    Raises:
        ValueError: there is no such codec, or it does not suit adapters.
    """
    if name == AUTO or (name in NAMES and ":" not in name):
        return CodecName(name)
    if (found := _TOP_K.fullmatch(name)) and 0 < float(found[1]) <= 0.5:
        return CodecName("topk", density=float(found[1]))
    if found := _POWERSGD.fullmatch(name):
        rank = int(found[1])
        if lora_rank is not None:
            raise ValueError(
                f"codec {name}: an adapter's matrices have rank {lora_rank} already, so rank"
                f" {rank} is at least {rank / lora_rank:.2g} of their numbers; use int8 or"
                " topk:0.1, or method full"
            )
        return CodecName("powersgd", rank=rank)
    raise ValueError(f"codec {name}: unknown; use one of {AUTO}, {', '.join(NAMES)}")


def _known(name: str) -> str:
    read_codec(name)
    return name


KnownCodec = Annotated[str, AfterValidator(_known)]
"""A setting that names a codec."""
