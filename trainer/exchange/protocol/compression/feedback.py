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

from trainer.exchange.protocol.codecs import Bf16, Bytes, Codec, Float32


class ErrorFeedback:
    """The residual of one sender, fp32 `[N]`, and the encoding of what it owes.

    A worker has one for its sums, new with each membership, and the coordinator one for averages.

    Args:
        codec: of every block.
        sizes: elements of each block.
    """

    def __init__(self, codec: Codec, sizes: Sequence[int]) -> None:
        self._codec = codec
        self._plain = Bf16()
        self.residuals = [np.zeros(size, np.float32) for size in sizes]
        """By block, what has not been sent."""
        self.batches = [0] * len(sizes)
        """The batch of the step that each residual is of."""

    @property
    def norm(self) -> float:
        """The L2 norm of what has not been sent: the loss if this sender is lost now."""
        return self.norm_of(range(len(self.residuals)))

    def norm_of(self, blocks: Iterable[int]) -> float:
        """Return the L2 norm of the residuals of some blocks."""
        owed = [self.residuals[block] for block in blocks]
        return math.sqrt(math.fsum(float(np.dot(part, part)) for part in owed))

    def encode(
        self, block: int, values: Float32, *, settle: bool = False, batch: int = 0
    ) -> tuple[Codec, Bytes]:
        """Return the bytes for a block, and the codec that they are in.

        That is bf16 if the block is to settle, which leaves no residual; and if it holds a NaN or
        Inf, or squares that overflow, which so reach the check that names their tensor.

        Args:
            values: `[n]` fp32; unchanged.
            settle: send the residuals; bf16's own rounding is dropped.
            batch: samples of this step over all workers. A short last batch is divided by less, so
                what is left of full ones is made to count less; 0: all are the same.
        """
        residual = self._add(block, values, batch)
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite = math.isfinite(np.dot(residual, residual))
        if settle or not is_finite:
            encoded = self._plain.encode(residual)
            residual[...] = 0
            return self._plain, encoded
        encoded = self._codec.encode(residual)
        sent = np.empty_like(residual)
        self._codec.decode(encoded, sent)
        np.subtract(residual, sent, out=residual)
        return self._codec, encoded

    def clear(self) -> None:
        """Forget all residuals, as a sender that has just joined."""
        for residual in self.residuals:
            residual[...] = 0

    def _add(self, block: int, values: Float32, batch: int) -> Float32:
        """Add to the residual, and return it."""
        residual, before = self.residuals[block], self.batches[block]
        if batch and before and batch != before:
            np.multiply(residual, np.float32(batch / before), out=residual)
        self.batches[block] = batch
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(residual, values, out=residual)
        return residual
