"""Chunks of logits, and for how many of them one read of a head that does not stay serves."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.planning.shapes import ModelShape
from trainer.planning.strategy import TrainingSetup
from trainer.planning.term import Term, term

LOGIT_ELEMENTS = 1 << 25
"""Logits held at once: 128 MiB in fp32. All of 8 x 2048 tokens of a Qwen3 would be 10 GB."""


def further_chunk_bytes(shape: ModelShape) -> int:
    """Return the bytes of a further chunk of logits for which one read of the head serves.

    It waits in fp32, or as its gradient, with hidden states or the sums of their gradient.
    """
    return math.ceil(4 * LOGIT_ELEMENTS * (1 + shape.hidden / shape.vocab))


def count_logit_chunks(shape: ModelShape, tokens: int, spare: float) -> int:
    """Return for how many chunks of logits of a micro-batch one read of the head serves.

    Args:
        tokens: of the micro-batch.
        spare: bytes that nothing else needs.
    """
    most = math.ceil(tokens / max(1, LOGIT_ELEMENTS // shape.vocab))
    return max(1, min(most, 1 + int(spare // further_chunk_bytes(shape))))


def further_chunks(shape: ModelShape, training: TrainingSetup) -> Iterator[Term]:
    """Yield the memory of all chunks but one, if there are several."""
    if training.logit_chunks > 1:
        yield term(
            "further chunks of logits, for one read of the head",
            "(chunks - 1) * chunk",
            "Motley: trainer/planning/logit_chunks.py",
            chunks=training.logit_chunks,
            chunk=further_chunk_bytes(shape),
        )
