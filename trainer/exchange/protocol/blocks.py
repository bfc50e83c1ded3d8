"""Encoded blocks as frames, and put together from frames."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol.codecs import Codec
from trainer.exchange.protocol.wire import CHUNK, Frame, MessageType
from trainer.system.errors import ProtocolError

_NONE = np.empty(0, np.uint8)


class BlockAssembly:
    """The bytes of one encoded block, filled strictly from front to back.

    A block that comes in one frame is not copied: its bytes are the frame's payload.
    """

    def __init__(self, codec: Codec, elements: int, weight: int) -> None:
        self.codec = codec
        self.weight = weight
        self.bytes = _NONE
        """Valid once the block is whole."""
        self._size = codec.encoded_size(elements)
        self._filled = 0

    def add_frame(self, frame: Frame) -> bool:
        """Add a frame and return whether the block is whole.

        Raises:
            ProtocolError: the frame does not continue the block.
        """
        end = frame.offset + len(frame.payload)
        if frame.offset != self._filled or end > self._size or not frame.payload:
            raise ProtocolError(
                f"block {frame.block}: bytes {frame.offset}..{end} came, "
                f"{self._filled} of {self._size} are here"
            )
        if frame.weight != self.weight:
            raise ProtocolError(f"block {frame.block}: weight changed within the block")
        if frame.codec != self.codec.id:
            raise ProtocolError(f"block {frame.block}: codec changed within the block")
        payload = np.frombuffer(frame.payload, np.uint8)
        if payload.size == self._size:
            self.bytes = payload
        else:
            if not self._filled:
                self.bytes = np.empty(self._size, dtype=np.uint8)
            self.bytes[frame.offset : end] = payload
        self._filled = end
        return end == self._size


def make_block_frames(
    kind: MessageType,
    encoded: NDArray[np.uint8],
    generation: int,
    step: int,
    block: int,
    codec: Codec,
    weight: int,
    rank: int = 0,
    shard: int = 0,
    chunk: int | None = None,
) -> Iterator[Frame]:
    """Yield the frames of one encoded block, in order, lazily; of `chunk` bytes, or of `CHUNK`."""
    view, chunk = encoded.data, chunk or CHUNK
    for offset in range(0, encoded.size, chunk):
        yield Frame(
            kind,
            view[offset : offset + chunk],
            generation=generation,
            step=step,
            rank=rank,
            block=block,
            shard=shard,
            weight=weight,
            offset=offset,
            codec=codec.id,
        )
