"""A teacher's scores of consecutive positions as rows of arrays, before they become `Scores`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.distill.logits.scores import Scores


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """N consecutive positions: K tokens kept exactly in each, and D draws."""

    kept: NDArray[np.int32]
    """`[N, K]` student ids."""
    kept_logprobs: NDArray[np.float32]
    """`[N, K]`"""
    drawn: NDArray[np.int32]
    """`[N, D]` student ids in the order of drawing; -1 if there was nothing to draw from."""
    drawn_logprobs: NDArray[np.float32]
    """`[N, D]`"""
    tail: NDArray[np.float32]
    """`[N]`, as in `Scores`, as are the next two."""
    dropped: NDArray[np.float32]
    entropy: NDArray[np.float32]

    @classmethod
    def concatenate_rows(cls, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__)
        )

    def __len__(self) -> int:
        return len(self.tail)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(*(getattr(self, name)[part] for name in self.__slots__))

    @property
    def finite(self) -> bool:
        """Whether the logits were finite: NaN or +Inf in one spoils its position's entropy."""
        return bool(np.isfinite(self.entropy).all())

    def to_scores(
        self, is_scored: NDArray[np.bool_] | None = None, *, with_logprobs: bool
    ) -> Scores:
        """Return the scores of a window.

        Args:
            is_scored: the window's positions that these are, `[T]`; None: all but the first.
        """
        length = len(self) + 1 if is_scored is None else len(is_scored)
        places = np.arange(1, length) if is_scored is None else np.flatnonzero(is_scored)
        count, kept = self.kept.shape
        ids, logprobs, counts, uniques = self._merged_draws()
        sizes = np.zeros(length + 1, np.int64)
        sizes[1 + places] = kept + uniques
        offsets = np.cumsum(sizes)
        is_kept = np.zeros(offsets[-1], np.bool_)
        is_kept[offsets[places, None] + np.arange(kept)] = True

        def join_entries(of_kept: NDArray, of_drawn: NDArray) -> NDArray:
            together = np.empty(offsets[-1], of_drawn.dtype)
            together[is_kept] = of_kept
            together[~is_kept] = of_drawn
            return together

        def place_values(values: NDArray[np.float32]) -> NDArray[np.float32]:
            whole = np.zeros(length, np.float32)
            whole[places] = values
            return whole

        return Scores(
            offsets=offsets,
            ids=join_entries(self.kept.reshape(-1), ids),
            logprobs=join_entries(self.kept_logprobs.reshape(-1), logprobs)
            if with_logprobs
            else None,
            counts=join_entries(np.zeros(count * kept, np.int32), counts),
            tail=place_values(self.tail),
            dropped=place_values(self.dropped),
            entropy=place_values(self.entropy),
        )

    def _merged_draws(
        self,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int32], NDArray[np.int64]]:
        """Return id, log-probability and count of each drawn token, and the tokens of each row."""
        count, draws = self.drawn.shape
        if draws == 0:
            nothing = np.zeros(0, np.int32)
            return nothing, nothing.astype(np.float32), nothing, np.zeros(count, np.int64)
        order = np.argsort(self.drawn, axis=1, kind="stable")
        ids = np.take_along_axis(self.drawn, order, axis=1)
        logprobs = np.take_along_axis(self.drawn_logprobs, order, axis=1)
        is_new = np.ones(ids.shape, np.bool_)  # a row's first never continues the row above
        is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        first = np.flatnonzero(is_new)
        counts = np.diff(first, append=ids.size).astype(np.int32)
        is_token = ids.reshape(-1)[first] >= 0
        first, counts = first[is_token], counts[is_token]
        uniques = np.bincount(first // draws, minlength=count)
        return ids.reshape(-1)[first], logprobs.reshape(-1)[first], counts, uniques
