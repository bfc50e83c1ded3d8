"""Figures of the present contents of a folder of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.distill.logits.dataset import QUARANTINE, SHARD_FILE, LogitsFolder
from trainer.distill.logits.scores import Scheme, Window
from trainer.system.errors import StorageError

BINS = 10
"""Bins of the histogram of kept mass, each 0.1 wide."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Figures of the distributions of some shards; means are over positions."""

    shards: int
    """The number read."""
    positions: int
    entries: float
    """Tokens with a value at a position."""
    kept_mass: float
    """Probability of the tokens kept exactly; of `sampled`, which keeps none, of the student's
    vocabulary."""
    dropped_mass: float
    """Probability of tokens that the student's vocabulary lacks."""
    entropy: float
    """Nats."""
    histogram: tuple[int, ...]
    """Positions by kept mass: from 0 to 0.1, ..., from 0.9 to 1."""


@dataclass(frozen=True, kw_only=True)
class LogitsSurvey:
    """The present contents of a folder."""

    shards: int
    """Complete ones."""
    windows: int
    tokens: int
    bytes: int
    """Bytes of their files."""
    requested: list[int]
    quarantined: int
    damaged: list[str]
    """Shards that could not be read for `contents`, and why."""
    contents: Contents | None
    """None if there is nothing yet."""

    @property
    def bytes_per_token(self) -> float | None:
        """The mean size of a token in the complete shards, in bytes."""
        return self.bytes / self.tokens if self.tokens else None


def survey_logits(folder: LogitsFolder, sample: int) -> LogitsSurvey:
    """Measure a folder; distributions are read from up to `sample` evenly spread shards.

    Raises:
        InputError: the folder has no usable dataset.json.
    """
    complete = [plan for plan in folder.plans if folder.is_complete(plan.number)]
    every = max(1, -(-len(complete) // sample))
    damaged: list[str] = []
    read: list[NDArray[np.float64]] = []
    for plan in complete[::every]:
        try:
            read.append(
                _measure_positions(folder.description.scheme, folder.read_shard(plan.number))
            )
        except StorageError as error:
            damaged.append(str(error))
    return LogitsSurvey(
        shards=len(complete),
        windows=sum(plan.windows for plan in complete),
        tokens=sum(plan.tokens for plan in complete),
        bytes=sum(
            (folder.shard_path(plan.number) / SHARD_FILE).stat().st_size for plan in complete
        ),
        requested=folder.list_requests(),
        quarantined=sum(1 for _ in (folder.path / QUARANTINE).glob("shard-*")),
        damaged=damaged,
        contents=_summarize_contents(read),
    )


def _measure_positions(scheme: Scheme, windows: Sequence[Window]) -> NDArray[np.float64]:
    """Return entries, kept mass, dropped mass and entropy of all positions, `[4, P]`."""
    rows: list[NDArray[np.float64]] = []
    for window in windows:
        scores = window.scores
        lost = scores.tail if scheme.kind == "topk" else scores.dropped
        entries = np.diff(scores.offsets)
        figures = [entries, 1 - lost, scores.dropped, scores.entropy]
        rows.append(np.array(figures, np.float64)[:, entries > 0])
    return np.concatenate(rows, axis=1) if rows else np.empty((4, 0))


def _summarize_contents(read: Sequence[NDArray[np.float64]]) -> Contents | None:
    if not read:
        return None
    every = np.concatenate(read, axis=1)
    positions = every.shape[1]
    entries, kept, dropped, entropy = (
        every.mean(axis=1).tolist() if positions else [0.0] * len(every)
    )
    histogram, _ = np.histogram(np.clip(every[1], 0, 1), bins=BINS, range=(0, 1))
    return Contents(
        shards=len(read),
        positions=positions,
        entries=entries,
        kept_mass=kept,
        dropped_mass=dropped,
        entropy=entropy,
        histogram=tuple(histogram.tolist()),
    )
