"""The codecs of a run by their name in a config."""

from __future__ import annotations

import re

from trainer.errors import InputError
from trainer.exchange.compression.powersgd import PowerSGD
from trainer.exchange.compression.quantized import Int4, Int8
from trainer.exchange.compression.topk import TopK
from trainer.exchange.protocol.codecs import Bf16, Codec, Fp32
from trainer.model.layout import GradientLayout

NAMES = ("fp32", "bf16", "int8", "int4", "topk:0.1", "topk:0.01", "powersgd:4")
"""As users write them; top-k takes other densities and PowerSGD other ranks."""
_SHARED = {codec.name: codec for codec in (Fp32, Bf16, Int8, Int4)}
_TOP_K = re.compile(r"topk:(0?\.\d{1,6})")
_POWERSGD = re.compile(r"powersgd:([1-9]\d?)")


def codecs_for(
    name: str, layout: GradientLayout, *, lora_rank: int | None = None
) -> tuple[Codec, ...]:
    """Return a codec for each block of the layout.

    Args:
        name: one of `NAMES`, `topk:DENSITY` above 0 and at most 0.5, or `powersgd:RANK`.
        lora_rank: of the adapters that train; None for a full fine-tune.

    Raises:
        InputError: there is no such codec, or it does not suit adapters.
    """
    if name in _SHARED:
        return (_SHARED[name](),) * len(layout.blocks)
    if (found := _TOP_K.fullmatch(name)) and 0 < float(found[1]) <= 0.5:
        density = float(found[1])
        return tuple(
            TopK(density, [tensor.size for tensor in block.tensors]) for block in layout.blocks
        )
    if found := _POWERSGD.fullmatch(name):
        rank = int(found[1])
        if lora_rank is not None:
            raise InputError(
                f"codec {name}: an adapter's matrices have rank {lora_rank} already, so rank"
                f" {rank} is at least {rank / lora_rank:.2g} of their numbers; use int8 or"
                " topk:0.1, or method full"
            )
        return tuple(
            PowerSGD(rank, [tensor.shape for tensor in block.tensors]) for block in layout.blocks
        )
    raise InputError(f"codec {name}: there is none of that name; use one of {', '.join(NAMES)}")
