"""Samples as torch tensors, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded

IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward."""

    input_ids: Tensor
    """int64 `[B, T]`, padded on the right."""
    lengths: Tensor
    """int64 `[B]`, tokens without padding."""
    labels: Tensor
    """int64 `[B]` classes, or `[B, T]` unshifted targets with `IGNORED`."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on another device."""
        return MicroBatch(
            self.input_ids.to(device, non_blocking=True),
            self.lengths.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
        )


def collate(samples: Sequence[Encoded], pad_token: int) -> MicroBatch:
    """Return samples as one padded micro-batch on the CPU."""
    lengths = [len(sample.input_ids) for sample in samples]
    width = max(1, *lengths)
    input_ids = np.full((len(samples), width), pad_token, dtype=np.int64)
    per_token = not isinstance(samples[0].labels, int)
    labels = np.full((len(samples), width) if per_token else (len(samples),), IGNORED, np.int64)
    for row, sample in enumerate(samples):
        input_ids[row, : lengths[row]] = sample.input_ids
        if isinstance(sample.labels, int):
            labels[row] = sample.labels
        else:
            labels[row, : lengths[row]] = sample.labels
    return MicroBatch(torch.from_numpy(input_ids), torch.tensor(lengths), torch.from_numpy(labels))
