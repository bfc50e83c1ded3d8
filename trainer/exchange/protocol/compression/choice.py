"""The codec of a run by its name in a config, and what its frames may be encoded in."""

from __future__ import annotations

import pkgutil

from trainer.config.codec import codec_kind
from trainer.exchange.protocol.codecs import Bf16, Codec
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
from trainer.model.layout import GradientLayout
from trainer.system.errors import InputError, ProtocolError

_WHOLE = Bf16()


class AgreedCodec:
    """The codec of a run, and what else its members send.

    Where it drops values, bf16 is always taken too: all that is owed comes in it.
    """

    def __init__(self, name: str, layout: GradientLayout) -> None:
        self.codec = make_codec(name)
        self._sizes = [block.size for block in layout.blocks]
        self.needs_feedback = codec_kind(name).needs_feedback

    def of(self, number: int, *, settled: bool = False) -> Codec:
        """Return the codec with a number on the wire.

        Args:
            settled: a settled step's gradients are in bf16 alone.

        Raises:
            ProtocolError: a block may not come in it.
        """
        if self.needs_feedback and number == _WHOLE.id:
            return _WHOLE
        if number != self.codec.id:
            raise ProtocolError(f"codec {number} came, {self.codec.name} was agreed")
        if settled and self.needs_feedback:
            raise ProtocolError(f"{self.codec.name} came in a settled step, bf16 is due")
        return self.codec

    def feedback(self) -> ErrorFeedback | None:
        """Return the sender's error feedback; None where none is needed."""
        return ErrorFeedback(self.codec, self._sizes) if self.needs_feedback else None

    def largest(self) -> tuple[int, ...]:
        """Return the most bytes that each encoded block can take."""
        kinds = (self.codec, _WHOLE) if self.needs_feedback else (self.codec,)
        return tuple(max(kind.nbytes(size) for kind in kinds) for size in self._sizes)


def make_codec(name: str) -> Codec:
    """Return a codec by its name; of `auto`, the last that it takes.

    Raises:
        InputError: there is no such codec.
    """
    try:
        made_by = codec_kind(name).made_by
    except ValueError as error:
        raise InputError(str(error)) from None
    made: Codec = pkgutil.resolve_name(f"trainer.exchange.protocol.{made_by}")()
    return made
