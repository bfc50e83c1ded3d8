"""Samples as torch tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

IGNORED = -100


@dataclass(frozen=True)
class NamedTokens:
    """A teacher's predictions at n target tokens: e entries, in order of the tokens."""

    at: Tensor
    """int64 `[e]`, each entry's index into flattened logits `[n, V]`."""
    row: Tensor
    """int64 `[e]`"""
    lengths: Tensor
    """int64 `[n]`, entries of each token."""
    weights: Tensor
    """`[e]`"""
    rest: Tensor
    """`[n]`"""
    entropy: Tensor
    """`[n]`"""

    def gather_entries(self, matrix: Tensor) -> Tensor:
        """Return the entries `[e]` of a matrix `[n, V]`."""
        return matrix.view(-1)[self.at]

    def scatter_entries(self, matrix: Tensor, values: Tensor | float) -> None:
        """Write the entries of a matrix `[n, V]`."""
        matrix.view(-1)[self.at] = values

    def sum_entries(self, values: Tensor) -> Tensor:
        """Return the sums `[n]` of values `[e]`, in the same order on every device."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def repeat_per_entry(self, values: Tensor) -> Tensor:
        """Return values `[n]` repeated for each entry."""
        return values[self.row]


@dataclass(frozen=True)
class AllTokens:
    """The same if each of the n tokens has every entry by id: `[e]` is `[n, V]`, no indices."""

    weights: Tensor
    """`[n, V]`"""
    rest: Tensor
    """`[n]`"""
    entropy: Tensor
    """`[n]`"""

    def gather_entries(self, matrix: Tensor) -> Tensor:
        """Return the matrix `[n, V]` itself."""
        return matrix

    def scatter_entries(self, matrix: Tensor, values: Tensor | float) -> None:
        """Overwrite a matrix `[n, V]`."""
        matrix[:] = values

    def sum_entries(self, values: Tensor) -> Tensor:
        """Return the sums `[n]` of values `[n, V]`."""
        return values.sum(-1)

    def repeat_per_entry(self, values: Tensor) -> Tensor:
        """Return values `[n]` repeated for each entry."""
        return values[:, None]


SoftChunk = NamedTokens | AllTokens


@dataclass(frozen=True)
class SoftTargetRows:
    """A teacher's predictions at N target tokens; `SoftTargets` of consecutive samples.

    It stays on the host, and is copied in chunks with the logits that it is compared with: the
    whole distributions of all tokens would be as large as all logits.
    """

    offsets: NDArray[np.int64]
    """`[N + 1]`"""
    ids: Tensor
    """int32 `[E]`"""
    weights: Tensor
    """fp32 `[E]`"""
    rest: Tensor
    """fp32 `[N]`"""
    entropy: Tensor
    """fp32 `[N]`"""

    def pin_memory(self) -> SoftTargetRows:
        """Return a copy in page-locked memory, from which copies do not block."""
        arrays = ("ids", "weights", "rest", "entropy")
        return replace(self, **{name: getattr(self, name).pin_memory() for name in arrays})

    def take_chunk(self, part: slice, logits: Tensor) -> SoftChunk:
        """Return some of the tokens, on the device and in the dtype of their logits `[n, V]`."""
        offsets = self.offsets[part.start : part.stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        ids, counts = self.ids[first:last], np.diff(offsets)
        weights, rest, entropy = (
            values.to(logits, non_blocking=True)
            for values in (self.weights[first:last], self.rest[part], self.entropy[part])
        )
        if _are_all(ids, counts, logits.shape[1]):
            return AllTokens(weights.view(logits.shape), rest, entropy)
        lengths = torch.from_numpy(counts).to(logits.device, non_blocking=True)
        rows = torch.arange(len(lengths), device=logits.device)
        row = torch.repeat_interleave(rows, lengths, output_size=last - first)
        at = row * logits.shape[1] + ids.to(logits.device, non_blocking=True)
        return NamedTokens(at, row, lengths, weights, rest, entropy)


def _are_all(ids: Tensor, counts: NDArray[np.int64], vocabulary: int) -> bool:
    """Return whether every position has all tokens by id."""
    if not (counts == vocabulary).all():
        return False
    every = torch.arange(vocabulary, dtype=ids.dtype)
    return torch.equal(ids.view(-1, vocabulary), every.expand(len(counts), -1))


class Targets(NamedTuple):
    """The N target tokens of a batch."""

    rows: Tensor
    """int64 `[N]`"""
    places: Tensor
    """int64 `[N]`, of the token before the target, which predicts it."""
    wanted: Tensor
    """int64 `[N]` token ids."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward: one sample each, or several."""

    input_ids: Tensor
    """int64 `[B, T]`, padded on the right."""
    lengths: Tensor
    """int64 `[B]`, tokens without padding."""
    labels: Tensor
    """int64 `[B]` classes, or `[B, T]` unshifted targets with `IGNORED`, which stay on the host."""
    positions: Tensor | None = None
    """int64 `[B, T]`, each token's place in its sample, if rows hold several."""
    soft: SoftTargetRows | None = None
    """Soft targets of the target tokens, row by row."""
    targets: Targets | None = None
    """Targets of a language model, on the device; `to` finds them."""
    hidden: Tensor | None = None
    """The final hidden states `[B, T, D]`, where they have been computed."""
    reference: Tensor | None = None
    """Log-probabilities of each row's targets of pairs by the reference, fp64 `[B]`."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on another device, for which the host does not wait."""
        classes = self.labels.ndim == 1
        targets = None
        if not classes:  # here, since the host would wait for a device that finds them
            rows, places = (self.labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
            found = rows, places, self.labels[rows, places + 1]
            targets = Targets(*(part.to(device, non_blocking=True) for part in found))
        return MicroBatch(
            self.input_ids.to(device, non_blocking=True),
            self.lengths.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True) if classes else self.labels,
            None if self.positions is None else self.positions.to(device, non_blocking=True),
            self.soft.pin_memory() if self.soft and device.type == "cuda" else self.soft,
            targets,
        )


def collate(rows: Sequence[Sequence[Encoded]], *, soft: bool = False) -> MicroBatch:
    """Return samples by row as one padded micro-batch on the CPU.

    Rows are padded with token 0: no other token sees it, and it has no target.

    Args:
        soft: with a teacher's predictions, which every sample then has.
    """
    lengths = [sum(len(sample.input_ids) for sample in row) for row in rows]
    shape = len(rows), max(1, *lengths)
    input_ids = np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    positions = np.tile(np.arange(shape[1]), (shape[0], 1))
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            span = slice(start, start + len(sample.input_ids))
            input_ids[number, span] = sample.input_ids
            labels[number, span] = sample.labels
            positions[number, start:] -= positions[number, start]
            start = span.stop
    classes = isinstance(rows[0][0].labels, int)
    packed = any(len(row) > 1 for row in rows)
    assert not (classes and packed), "the head of a classifier reads the end of a row"
    return MicroBatch(
        torch.from_numpy(input_ids),
        torch.tensor(lengths),
        torch.from_numpy(labels[:, 0].copy() if classes else labels),
        torch.from_numpy(positions) if packed else None,
        soft_rows([sample for row in rows for sample in row]) if soft else None,
    )


def soft_rows(samples: Sequence[Encoded]) -> SoftTargetRows:
    """Return a teacher's predictions at the target tokens of consecutive samples."""
    offsets: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
    columns: list[tuple[NDArray[np.generic], ...]] = []
    for sample in samples:
        soft = sample.soft
        assert soft is not None, "a sample has no soft targets"
        wanted = sample.labels != IGNORED
        lengths = np.diff(soft.offsets)
        all_wanted = not lengths[~wanted].any()  # as whole distributions, large to index
        entries = slice(None) if all_wanted else np.repeat(wanted, lengths)
        offsets.append(lengths[wanted])
        columns.append(
            (soft.ids[entries], soft.weights[entries], soft.rest[wanted], soft.entropy[wanted])
        )
    ids, weights, rest, entropy = (
        torch.from_numpy(np.concatenate(column)) for column in zip(*columns, strict=True)
    )
    return SoftTargetRows(np.cumsum(np.concatenate(offsets)), ids, weights, rest, entropy)
