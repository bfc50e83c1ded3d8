"""One end of the exchange, without its socket: what it sends is decoded at once."""

from __future__ import annotations

import numpy as np

from trainer.exchange.protocol.codecs import Bf16
from trainer.exchange.protocol.compression.choice import make_codec
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
from trainer.model.layout import GradientLayout
from trainer.replica.base import OnBlock


class Sender:
    """It encodes, with or without error feedback, and counts its bytes."""

    def __init__(self, codec: str, layout: GradientLayout, *, feedback: bool) -> None:
        self._layout = layout
        self._codec = make_codec(codec)
        sizes = [block.size for block in layout.blocks]
        self._feedback = ErrorFeedback(self._codec, sizes) if feedback else None
        self.sent = 0
        """Bytes until now."""

    def add_to(self, total: np.ndarray, *, settle: bool = False) -> OnBlock:
        """Return a function that adds a block's decoded values to a flat vector.

        Args:
            total: `[N]`; of a settled round `[2 N]`, with the second moments behind.
            settle: all that is owed is sent, in bf16.
        """
        count = len(self._layout.blocks)

        def add(index: int, values: np.ndarray) -> None:
            if self._feedback is not None and index < count:
                codec, encoded = self._feedback.encode(index, values, settle=settle)
            else:
                codec = self._codec if self._feedback is None else Bf16()
                encoded = codec.encode(values)
            self.sent += encoded.nbytes
            block = self._layout.blocks[index % count]
            start = block.start + (index // count) * self._layout.size
            decoded = np.empty(block.size, np.float32)
            codec.decode(encoded, decoded)
            total[start : start + block.size] += decoded

        return add
