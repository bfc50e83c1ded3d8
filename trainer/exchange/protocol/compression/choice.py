"""The codec of a run by its name in a config, and what a member sends in it."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence

from trainer.config.codec import codec_kind
from trainer.exchange.protocol.codecs import Bytes, Codec, Float32
from trainer.system.errors import InputError, ProtocolError


class AgreedCodec:
    """The codec of a run, of one that sends: each block by itself, and nothing of it later.

    Args:
        codec: of every block.
        sizes: elements of each block.
    """

    has_feedback = False
    """Whether what is dropped of a block is sent with a later one; then blocks are encoded late,
    when they are sent, and only those that count."""

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self.codec = codec
        self._sizes = sizes

    def of(self, number: int, *, settled: bool = False) -> Codec:
        """Return the codec with a number on the wire.

        Args:
            settled: of a step after which no residual is left.

        Raises:
            ProtocolError: a block may not come in it.
        """
        del settled
        if number != self.codec.id:
            raise ProtocolError(f"codec {number} came, {self.codec.name} was agreed")
        return self.codec

    def encode(
        self, block: int, values: Float32, *, settle: bool = False, batch: int = 0
    ) -> tuple[Codec, Bytes]:
        """Return the bytes for a block, and the codec that they are in."""
        del block, settle, batch
        return self.codec, self.codec.encode(values)

    def largest(self) -> tuple[int, ...]:
        """Return the most bytes that each encoded block can take."""
        return tuple(map(self.codec.nbytes, self._sizes))

    @property
    def norm(self) -> float:
        """The L2 norm of what has not been sent: the loss if this sender is lost now."""
        return self.norm_of(range(len(self._sizes)))

    def norm_of(self, blocks: Iterable[int]) -> float:
        """Return the L2 norm of what has not been sent of some blocks."""
        del blocks
        return 0.0

    def clear(self) -> None:
        """Forget what has not been sent, as a sender that has just joined."""


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
