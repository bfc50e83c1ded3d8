"""A micro-batch as one vector of words, its only upload to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import CHUNK_ROWS, padded_length, padded_words, upload_regions
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.kernels.embedding import sort_tokens
from trainer.replica.wgpu.kernels.pool import SKIPPED
from trainer.replica.wgpu.soft_target_tables import make_tables, table_width

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

_FLOATS = ("counts", "weights", "shares")
IGNORED = -100


@dataclass(frozen=True)
class Bucket:
    """The shape of a micro-batch; each has its own recording."""

    samples: int
    length: int
    """Tokens a sample, padding included."""
    classify: bool
    """One target a sample, at its last token; else one for each token."""
    entries: int = 0
    """A teacher's classes for each target; 0 without a teacher."""

    @property
    def rows(self) -> int:
        """M = samples * length."""
        return self.samples * self.length

    @property
    def chunk_rows(self) -> int:
        """Targets that are processed together."""
        return min(CHUNK_ROWS, self.samples if self.classify else self.rows)

    @property
    def chunks(self) -> int:
        """The most chunks of targets."""
        return -(-(self.samples if self.classify else self.rows) // self.chunk_rows)

    @property
    def regions(self) -> dict[str, int]:
        """Words of every part of the vector, in order."""
        return upload_regions(self.rows, self.chunks * self.chunk_rows, self.entries)

    @property
    def words(self) -> int:
        """Length of the vector; every part begins at an aligned byte."""
        return sum(padded_words(count) for count in self.regions.values())

    def window(self, vector: Array, name: str) -> Array:
        """Return a part of the vector on the device."""
        offset = 0
        for part, count in self.regions.items():
            if part == name:
                kind = "f32" if part in _FLOATS else "u32"
                return Array(vector.buffer, (count,), kind, vector.offset + 4 * offset)
            offset += padded_words(count)
        raise KeyError(name)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on the host."""

    bucket: Bucket
    vector: NDArray[np.uint32]
    """`[bucket.words]`"""
    chunks: int
    """Chunks that have targets."""
    weight: int
    """`weight_of` the samples."""
    entropy: float = 0.0
    """The teacher's, summed over targets, in nats."""


def pack_samples(
    samples: Sequence[Encoded],
    shares: tuple[float, float] | None = None,
    class_weights: Sequence[int] | None = None,
) -> PackedBatch:
    """Return samples as the vector of the smallest bucket, padded on the right with token 0.

    A target is predicted from the last token of a classified sample, else from the token before it.

    Args:
        shares: weights of the cross-entropy and of the divergence from a teacher; None ignores
            teachers.
        class_weights: how much a sample of each class counts; None: 1.
    """
    classify = isinstance(samples[0].labels, int)
    length = padded_length(max(len(sample.input_ids) for sample in samples))
    ids = np.zeros((len(samples), length), np.uint32)
    places: list[NDArray[np.int64]] = []  # of each sample's targets
    rows: list[NDArray[np.int64]] = []
    classes: list[NDArray[np.int64]] = []
    for number, sample in enumerate(samples):
        count = len(sample.input_ids)
        ids[number, :count] = sample.input_ids
        if isinstance(sample.labels, int):
            places.append(np.array([count]))
            classes.append(np.array([sample.labels]))
        else:
            labels = np.asarray(sample.labels, np.int64)
            places.append(1 + np.flatnonzero(labels[1:] != IGNORED))
            classes.append(labels[places[-1]])
        rows.append(number * length + places[-1] - 1)
    picked, wanted = np.concatenate(rows), np.concatenate(classes)
    counts = np.ones(len(picked)) if class_weights is None else np.array(class_weights)[wanted]
    unique, starts, order = sort_tokens(ids.reshape(-1))
    parts: dict[str, NDArray[np.generic]] = {
        "ids": ids.reshape(-1),
        "rows": picked.astype(np.uint32),
        "classes": wanted.astype(np.uint32),
        "counts": counts.astype(np.float32),
        "unique": unique,
        "starts": starts,
        "order": order,
    }
    entries, entropy = 0, 0.0
    if shares is not None:
        entries = table_width(samples, places)
        taught = make_tables(samples, places, entries)
        parts["taught"], parts["weights"] = taught.classes.reshape(-1), taught.weights.reshape(-1)
        parts["shares"] = np.array(shares, np.float32)
        entropy = taught.entropy
    bucket = Bucket(len(samples), length, classify, entries)
    chunks = -(-len(picked) // bucket.chunk_rows)
    return PackedBatch(
        bucket, _concatenate_parts(bucket, parts), chunks, int(counts.sum()), entropy
    )


def _concatenate_parts(
    bucket: Bucket, parts: Mapping[str, NDArray[np.generic]]
) -> NDArray[np.uint32]:
    vector = np.zeros(bucket.words, np.uint32)
    offset = 0
    for name, count in bucket.regions.items():
        if count:
            part = parts[name]
            assert len(part) <= count, (name, len(part), count)
            vector[offset : offset + len(part)] = part.view(np.uint32)
            if name == "rows":
                vector[offset + len(part) : offset + count] = SKIPPED
        offset += padded_words(count)
    return vector
