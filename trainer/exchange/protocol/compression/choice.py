"""The codecs of a run by their name in a config, and what its frames may be encoded in."""

from __future__ import annotations

from trainer.config.codec import AUTO, read_codec
from trainer.exchange.protocol.codecs import Bf16, Codec, make_codec
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
from trainer.exchange.protocol.compression.powersgd import PowerSGD
from trainer.exchange.protocol.compression.quantized import Int4, Int8
from trainer.exchange.protocol.compression.topk import TopK
from trainer.model.layout import GradientLayout
from trainer.system.errors import InputError, ProtocolError

_WHOLE = Bf16()


class AgreedCodecs:
    """One sender's codecs of a run, and those that it receives.

    Where the agreed one drops values, bf16 is always taken too: all that is owed comes in it.
    """

    def __init__(self, name: str, layout: GradientLayout) -> None:
        self.codecs = codecs_for(name, layout)
        self.name = name
        self._sizes = [block.size for block in layout.blocks]
        self.needs_feedback = read_codec(name).needs_feedback

    def of(self, block: int, number: int, *, settled: bool = False) -> Codec:
        """Return the codec with a number on the wire.

        Args:
            settled: a settled step's gradients are in bf16 alone.

        Raises:
            ProtocolError: a block may not come in it.
        """
        agreed = self.codecs[block]
        if self.needs_feedback and number == _WHOLE.id:
            return _WHOLE
        if number != agreed.id:
            raise ProtocolError(f"codec {number} came, {agreed.name} was agreed")
        if settled and self.needs_feedback:
            raise ProtocolError(f"{agreed.name} came in a settled step, bf16 is due")
        return agreed

    def feedback(self) -> ErrorFeedback | None:
        """Return the sender's error feedback; None where none is needed."""
        return ErrorFeedback(self.codecs, self._sizes) if self.needs_feedback else None

    def largest(self) -> tuple[int, ...]:
        """Return the most bytes that each encoded block can take."""
        also = (_WHOLE,) if self.needs_feedback else ()
        pairs = zip(self.codecs, self._sizes, strict=True)
        return tuple(max(kind.nbytes(size) for kind in (codec, *also)) for codec, size in pairs)


def codecs_for(
    name: str, layout: GradientLayout, *, lora_rank: int | None = None
) -> tuple[Codec, ...]:
    """Return a codec for each block of the layout; one with a state belongs to one sender.

    Args:
        name: as `trainer.config.codec.read_codec` takes it.
        lora_rank: of the adapters that train; None for a full fine-tune.

    Raises:
        InputError: there is no such codec, or it does not suit adapters.
    """
    try:
        chosen = read_codec(name, lora_rank)
    except ValueError as error:
        raise InputError(str(error)) from None
    if chosen.kind == "topk":
        return tuple(
            TopK(chosen.density, [tensor.size for tensor in block.tensors])
            for block in layout.blocks
        )
    if chosen.kind == "powersgd":
        return tuple(
            PowerSGD(chosen.rank, [tensor.shape for tensor in block.tensors])
            for block in layout.blocks
        )
    quantized = {"int8": Int8, "int4": Int4, AUTO: Int8}
    codec = quantized[name]() if name in quantized else make_codec(name)
    return (codec,) * len(layout.blocks)
