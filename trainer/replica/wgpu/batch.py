"""A micro-batch as one vector of words, its only upload to the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import CHUNK_ROWS, padded_length, padded_words, upload_regions
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.kernels.embedding import Words, sort_tokens
from trainer.replica.wgpu.kernels.pool import SKIPPED
from trainer.system.backends import TORCH_BACKENDS
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.soft_targets import SoftTargets
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

    def slice_vector(self, vector: Array, name: str) -> Array:
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

    def list_tokens(self) -> tuple[PackedBatch, Words]:
        """Return its tokens, each once, and itself with their places in this list for ids."""
        vector = self.vector.copy()
        ids = vector[: self.bucket.rows]  # they come first
        tokens, ids[:] = np.unique(ids, return_inverse=True)
        return replace(self, vector=vector), tokens


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
        entries = compute_table_width(samples, places)
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


@dataclass(frozen=True)
class SoftTargetTables:
    """The targets of consecutive samples: N rows of K entries."""

    classes: NDArray[np.uint32]
    """`[N, K]`"""
    weights: NDArray[np.float32]
    """`[N, K]`, 0 after the last entry of a row."""
    entropy: float
    """Entropy of all rows together, in nats: their cross-entropy less this is the divergence."""


def compute_table_width(samples: Sequence[Encoded], places: Sequence[NDArray[np.int64]]) -> int:
    """Return the most entries of any target, rounded up to a power of two for fewer recordings."""
    most = 1
    for sample, chosen in zip(samples, places, strict=True):
        counts = np.diff(_soft_targets(sample).offsets)[chosen]
        most = max(most, int(counts.max(initial=0)))
    return 1 << (most - 1).bit_length()


def make_tables(
    samples: Sequence[Encoded], places: Sequence[NDArray[np.int64]], width: int
) -> SoftTargetTables:
    """Return the entries of every target; `places` are the positions of each sample's, ascending.

    Raises:
        InputError: a part of a distribution is stored only as a sum.
    """
    classes: list[NDArray[np.uint32]] = []
    weights: list[NDArray[np.float32]] = []
    entropy = 0.0
    for sample, chosen in zip(samples, places, strict=True):
        soft = _soft_targets(sample)
        if soft.rest[chosen].any():
            raise InputError(
                "the wgpu engine does not compute logits whose tail is one number (tail_samples"
                f" 0): use --gpu-backend {' or '.join(TORCH_BACKENDS)}"
            )
        counts = np.diff(soft.offsets)
        wanted = np.zeros(len(counts), bool)
        wanted[chosen] = True
        entries = np.repeat(wanted, counts)
        there = np.arange(width) < counts[chosen, None]
        ids, shares = np.zeros(there.shape, np.uint32), np.zeros(there.shape, np.float32)
        ids[there], shares[there] = soft.ids[entries], soft.weights[entries]
        classes.append(ids)
        weights.append(shares)
        entropy += float(soft.entropy[chosen].sum(dtype=np.float64))
    return SoftTargetTables(np.concatenate(classes), np.concatenate(weights), entropy)


def _soft_targets(sample: Encoded) -> SoftTargets:
    assert sample.soft is not None, "a sample of a distillation has no teacher"
    return sample.soft
