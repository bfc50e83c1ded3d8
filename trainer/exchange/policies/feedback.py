"""Error feedback: what a lossy codec dropped is added to what comes next (arXiv:1901.09847).

    due = residual + sum        send C(due)        residual = due - C(due)

Residuals are kept as sums over samples, as contributions are, not as means. So a worker's share may
change from step to step, and the coordinator divides by the weight of the step only: what is sent
late counts as much as it would have counted in its own step. When a worker is lost, its residual is
lost with it, at most what `norm` says; those of other workers do not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from trainer.config.codec import find_codec
from trainer.exchange.protocol.codecs import Bf16, Bytes, Codec, Float32, SenderCodec, make_codec
from trainer.model.layout import GradientLayout
from trainer.system.errors import ProtocolError


class ErrorFeedback(SenderCodec):
    """The residual of one sender, fp32 `[N]`, and its encoding.

    A worker has one for its sums, new with each membership, and the coordinator one for averages.
    Besides the codec bf16 is always taken: all that is owed comes in it.
    """

    has_feedback = True

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        super().__init__(codec, sizes)
        self._plain = Bf16()
        self.residuals = [np.zeros(size, np.float32) for size in sizes]
        """By block, what has not been sent."""
        self.batches = [0] * len(sizes)
        """The batch of the step that each residual is of."""

    def find_codec(self, number: int, *, flush: bool = False) -> Codec:
        """Return the codec with a number on the wire; a flush step's sums are in bf16 alone.

        Raises:
            ProtocolError: a block may not come in it.
        """
        if number == self._plain.id:
            return self._plain
        codec = super().find_codec(number)
        if flush:
            raise ProtocolError(f"{codec.name} received in a flush step, expected bf16")
        return codec

    def compute_largest_sizes(self) -> tuple[int, ...]:
        """Return the most bytes that each encoded block can take."""
        plain = map(self._plain.encoded_size, self._sizes)
        return tuple(map(max, zip(super().compute_largest_sizes(), plain, strict=True)))

    def compute_norm(self, blocks: Iterable[int]) -> float:
        """Return the L2 norm of the residuals of some blocks."""
        residuals = [self.residuals[block] for block in blocks]
        return math.sqrt(math.fsum(float(np.dot(part, part)) for part in residuals))

    def encode(
        self, block: int, values: Float32, *, flush: bool = False, batch: int = 0
    ) -> tuple[Codec, Bytes]:
        """Return the bytes for a block, and the codec that they are in.

        That is bf16 of a flush, which leaves no residual; and if it holds a NaN or
        Inf, or squares that overflow, which so reach the check that names their tensor.

        Args:
            values: `[n]` fp32; unchanged.
            flush: send the residuals; bf16's own rounding is dropped.
            batch: samples of this step over all workers. A short last batch is divided by less, so
                what is left of full ones is made to count less; 0: all are the same.
        """
        residual = self._add_to_residual(block, values, batch)
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = math.isfinite(np.dot(residual, residual))
        if flush or not is_finite:
            encoded = self._plain.encode(residual)
            residual[...] = 0
            return self._plain, encoded
        encoded = self.codec.encode(residual)
        sent = np.empty_like(residual)
        self.codec.decode(encoded, sent)
        np.subtract(residual, sent, out=residual)
        return self.codec, encoded

    def clear_residuals(self) -> None:
        """Forget all residuals, as a sender that has just joined."""
        for residual in self.residuals:
            residual[...] = 0

    def _add_to_residual(self, block: int, values: Float32, batch: int) -> Float32:
        """Add to the residual, and return it."""
        residual, before = self.residuals[block], self.batches[block]
        if batch and before and batch != before:
            np.multiply(residual, np.float32(batch / before), out=residual)
        self.batches[block] = batch
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(residual, values, out=residual)
        return residual


def make_sender_codec(name: str, layout: GradientLayout) -> SenderCodec:
    """Return the codec of a run, of one sender, with error feedback where it needs that."""
    made = ErrorFeedback if find_codec(name).needs_feedback else SenderCodec
    return made(make_codec(name), [block.size for block in layout.blocks])
