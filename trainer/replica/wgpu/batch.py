"""A micro-batch as one vector of words, the only thing that goes up to the device for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.replica.wgpu.array import ALIGNMENT, Array
from trainer.replica.wgpu.head import CHUNK_ROWS
from trainer.replica.wgpu.kernels.embedding import sort_tokens
from trainer.replica.wgpu.kernels.pool import SKIPPED

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_STEP = 16
"""Widths are rounded up to multiples of it: fewer recordings, and whole vectors in every row."""
_WORDS = ALIGNMENT // 4
IGNORED = -100


@dataclass(frozen=True)
class Bucket:
    """The shape of a micro-batch; each has its own recording."""

    samples: int
    length: int
    """Tokens a sample, padding included."""
    classify: bool
    """One target a sample, at its last token; else one a token."""

    @property
    def rows(self) -> int:
        """M = samples * length."""
        return self.samples * self.length

    @property
    def chunk_rows(self) -> int:
        """Targets that are worked on together."""
        return min(CHUNK_ROWS, self.samples if self.classify else self.rows)

    @property
    def chunks(self) -> int:
        """The most chunks of targets."""
        return -(-(self.samples if self.classify else self.rows) // self.chunk_rows)

    @property
    def regions(self) -> dict[str, int]:
        """Words of every part of the vector, in order."""
        targets = self.chunks * self.chunk_rows
        return {
            "ids": self.rows,
            "rows": targets,
            "classes": targets,
            "probabilities": targets,
            "unique": self.rows,
            "starts": self.rows + 1,
            "order": self.rows,
        }

    @property
    def words(self) -> int:
        """Length of the vector; every part begins at an aligned byte."""
        return sum(_padded(count) for count in self.regions.values())

    def window(self, vector: Array, name: str) -> Array:
        """Return a part of the vector on the device."""
        offset = 0
        for part, count in self.regions.items():
            if part == name:
                kind = "f32" if part == "probabilities" else "u32"
                return Array(vector.buffer, (count,), kind, vector.offset + 4 * offset)
            offset += _padded(count)
        raise KeyError(name)


@dataclass(frozen=True)
class Packed:
    """One micro-batch on the host."""

    bucket: Bucket
    vector: NDArray[np.uint32]
    """`[bucket.words]`"""
    chunks: int
    """Chunks that have targets."""
    weight: int
    """Targets."""


def bucket_of(samples: Sequence[Encoded]) -> Bucket:
    """Return the smallest bucket that holds the samples."""
    longest = max(len(sample.input_ids) for sample in samples)
    return Bucket(len(samples), padded_length(longest), isinstance(samples[0].labels, int))


def padded_length(tokens: int) -> int:
    """Return the width of a micro-batch whose longest sample has that many tokens."""
    return -(-tokens // _STEP) * _STEP


def pack(samples: Sequence[Encoded]) -> Packed:
    """Return samples as the vector of their bucket, padded on the right with token 0.

    What a target is read from: the last token of a classified sample; else the token before it.
    """
    bucket = bucket_of(samples)
    ids = np.zeros((bucket.samples, bucket.length), np.uint32)
    rows: list[NDArray[np.int64]] = []
    classes: list[NDArray[np.int64]] = []
    for number, sample in enumerate(samples):
        count = len(sample.input_ids)
        ids[number, :count] = sample.input_ids
        first = number * bucket.length
        if isinstance(sample.labels, int):
            rows.append(np.array([first + count - 1]))
            classes.append(np.array([sample.labels]))
        else:
            valid = np.flatnonzero(np.asarray(sample.labels[1:]) != IGNORED)
            rows.append(first + valid)
            classes.append(np.asarray(sample.labels[1:], np.int64)[valid])
    picked, wanted = np.concatenate(rows), np.concatenate(classes)
    unique, starts, order = sort_tokens(ids.reshape(-1))
    parts: dict[str, NDArray[np.generic]] = {
        "ids": ids.reshape(-1),
        "rows": picked.astype(np.uint32),
        "classes": wanted.astype(np.uint32),
        "probabilities": np.ones(len(picked), np.float32),
        "unique": unique,
        "starts": starts,
        "order": order,
    }
    vector = np.zeros(bucket.words, np.uint32)
    offset = 0
    for name, count in bucket.regions.items():
        part = parts[name]
        assert len(part) <= count, (name, len(part), count)
        vector[offset : offset + len(part)] = part.view(np.uint32)
        if name == "rows":
            vector[offset + len(part) : offset + count] = SKIPPED
        offset += _padded(count)
    chunks = -(-len(picked) // bucket.chunk_rows)
    return Packed(bucket, vector, chunks, len(picked))


def _padded(count: int) -> int:
    return -(-count // _WORDS) * _WORDS
