"""The codecs of a run by their name in a config, and what its frames may be encoded in."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

from trainer.config.codec import read_codec
from trainer.exchange.protocol.codecs import Bf16, Codec
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
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
        self.needs_feedback = read_codec(name).kind.needs_feedback

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


def codecs_for(name: str, layout: GradientLayout) -> tuple[Codec, ...]:
    """Return a codec for each block of the layout; one with a state belongs to one sender."""
    return tuple(
        make_codec(name, [each.shape for each in block.tensors]) for block in layout.blocks
    )


def make_codec(name: str, shapes: Sequence[tuple[int, ...]] = ()) -> Codec:
    """Return a fresh codec of a block whose tensors have these shapes.

    Args:
        name: as `trainer.config.codec.read_codec` takes it.

    Raises:
        InputError: there is no such codec.
    """
    try:
        chosen = read_codec(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    made = pkgutil.resolve_name(f"trainer.exchange.protocol.{chosen.kind.made_by}")
    return made() if chosen.number is None else made(chosen.number, shapes)
