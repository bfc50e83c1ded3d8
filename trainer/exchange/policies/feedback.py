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
from trainer.exchange.protocol.codecs import Bytes, Codec, Float32, SenderCodec, make_codec
from trainer.model.layout import GradientLayout


class ErrorFeedback(SenderCodec):
    """The residual of one sender, fp32 `[N]`, and its encoding.

    A worker has one for its sums, new with each membership, and the coordinator one for averages.
    """

    has_feedback = True

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        super().__init__(codec, sizes)
        self.residuals = [np.zeros(size, np.float32) for size in sizes]
        """By block, what has not been sent."""
        self.batches = [0] * len(sizes)
        """The batch of the step that each residual is of."""

    def compute_norm(self, blocks: Iterable[int]) -> float:
        """Return the L2 norm of the residuals of some blocks."""
        residuals = [self.residuals[block] for block in blocks]
        return math.sqrt(math.fsum(float(np.dot(part, part)) for part in residuals))

    def encode(
        self, block: int, values: Float32, *, in_bf16: bool = False, batch: int = 0
    ) -> tuple[Codec, Bytes]:
        """Return the bytes for a block with its residual, and the codec that they are in.

        bf16 leaves no residual: its own rounding is dropped.

        Args:
            values: `[n]` fp32; unchanged.
            in_bf16: send the residuals.
            batch: samples of this step over all workers. A short last batch is divided by less, so
                what is left of full ones is made to count less; 0: all are the same.
        """
        residual = self._add_to_residual(block, values, batch)
        codec, encoded = super().encode(block, residual, in_bf16=in_bf16)
        if codec is not self.codec:
            residual[...] = 0
            return codec, encoded
        sent = np.empty_like(residual)
        codec.decode(encoded, sent)
        np.subtract(residual, sent, out=residual)
        return codec, encoded

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


def make_sender_codec(name: str, layout: GradientLayout, *, rounds: bool = False) -> SenderCodec:
    """Return the codec of a run, of one sender.

    Args:
        rounds: the run takes outer steps: second moments may travel, as blocks of their own, and a
            codec that needs it has error feedback.
    """
    made = ErrorFeedback if rounds and find_codec(name).needs_feedback else SenderCodec
    blocks = (layout.with_second_moments if rounds else layout).blocks
    return made(make_codec(name), [block.size for block in blocks])
