"""Ways to encode that Motley does not have, to see what they cost."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.exchange.protocol.codecs import Bytes
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
from trainer.exchange.protocol.compression.quantized import Int4

Float32 = NDArray[np.float32]


class Forgetful(ErrorFeedback):
    """What a codec drops is lost."""

    kept = 0.0

    def _add(self, block: int, values: Float32, batch: int) -> Float32:
        self.residuals[block] *= np.float32(self.kept)
        return super()._add(block, values, batch)


class Fading(Forgetful):
    """Of what is owed a twentieth is forgotten each time (SparseLoCo, arXiv:2508.15706)."""

    kept = 0.95


class TwoBits(Int4):
    """Four values a group of 32, a and 3 a with either sign: 0.28 bytes an element.

    `a` is the power of two nearest to a third of the group's largest magnitude. int4 has all four
    exactly, so they travel as int4, whose bytes the figures show.
    """

    def encode(self, values: Float32) -> Bytes:
        """Return the nearest of the four as int4."""
        rows = np.pad(values, (0, -values.size % self.group)).reshape(-1, self.group)
        third = np.abs(rows).max(axis=1, keepdims=True) / np.float32(3)
        unit = np.exp2(np.rint(np.log2(np.maximum(third, np.finfo(np.float32).tiny))))
        coarse = np.where(np.abs(rows) < 2 * unit, unit, 3 * unit) * np.sign(rows)
        return super().encode(coarse.astype(np.float32).ravel()[: values.size])
