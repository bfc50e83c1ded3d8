"""Bytes that a teacher's scores take on the share, from the columns of their files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_SAMPLED_DIFFERENT = 0.24
"""Different tokens among 50 samples of a whole distribution: 12 (arXiv 2503.16870)."""
_TAIL_DIFFERENT = 0.96
"""The same among 8 samples of what top-64 leaves: 7.7 (docs/logits-format.md)."""
_VALUE_BYTES = {"float16": 1.5, "float32": 3.05}
"""Bytes of a probability, its logarithm or an entropy: its exponent hardly varies and is packed."""
_TAIL_COUNT_BYTES, _COUNT_BYTES = 0.1, 0.7
"""Bytes of a count: beside kept tokens most are 0, without them they are small numbers."""


@dataclass(frozen=True, kw_only=True)
class StoredScores:
    """Data stored for a position; the defaults are those of `trainer distill teacher`."""

    scheme: Literal["topk", "sampled", "full"] = "topk"
    top_k: int = 64
    tail_samples: int = 8
    samples: int = 50
    values: Literal["float16", "float32"] = "float16"

    def entries_per_position(self, vocabulary: int) -> float:
        """Return the tokens that have a value at a position, of a student's vocabulary."""
        found = {
            "topk": self.top_k + _TAIL_DIFFERENT * self.tail_samples,
            "sampled": _SAMPLED_DIFFERENT * self.samples,
            "full": vocabulary,
        }[self.scheme]
        return min(found, vocabulary)


def column_bytes(kept: StoredScores, vocabulary: int) -> dict[str, float]:
    """Return the bytes a token of each column that grows with the tokens, as it is packed.

    Byte streams of ids keep as many bits as the vocabulary has; values have the bytes that were
    measured of them, and the offsets of lists hardly any.
    """
    entries, id_bytes = kept.entries_per_position(vocabulary), math.log2(max(vocabulary, 2)) / 8
    value = _VALUE_BYTES[kept.values]
    columns = {"tokens": id_bytes}
    if kept.scheme != "full":
        columns["ids"] = entries * id_bytes
    if kept.scheme != "sampled":
        columns["logprobs"] = entries * value
    if kept.scheme == "sampled" or (kept.scheme == "topk" and kept.tail_samples):
        each = _COUNT_BYTES if kept.scheme == "sampled" else _TAIL_COUNT_BYTES
        columns["counts"] = entries * each
    # Nothing is kept exactly of `sampled`: its tail is 1 everywhere.
    columns["tail"] = 0.0 if kept.scheme == "sampled" else value
    columns["dropped"] = 0.0 if kept.scheme == "sampled" else value
    columns["entropy"] = value
    return columns


def bytes_per_token(kept: StoredScores, vocabulary: int) -> float:
    """Return the bytes a token of whole shards; within a fifth of what is written."""
    return sum(column_bytes(kept, vocabulary).values())
