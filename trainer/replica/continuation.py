"""The new tokens of a batch of samples, chosen until each has ended; the same on all backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.replica.sampling import Logits, Sampling

Until = Callable[[int, Sequence[int]], bool]
"""Called with a prompt's number and its new tokens after each one; True ends it."""


class Continuation:
    """A batch in progress.

    Args:
        samples: the numbers of its prompts, `[B]`.
        max_new_tokens: of each sample.
        stop: tokens that end a sample.
        until: ends a sample, too; it sees each new token.
    """

    def __init__(
        self,
        samples: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int],
        until: Until | None = None,
    ) -> None:
        self.made: dict[int, list[int]] = {sample: [] for sample in samples}
        """The new tokens of each sample; one of `stop` is the last."""
        self._samples, self._sampling = samples, sampling
        self._most, self._stop, self._until = max_new_tokens, stop, until
        self._running = set(samples)
        self._place = 0

    def choose_tokens(self, logits: Logits) -> NDArray[np.int64] | None:
        """Choose the next token `[B]` of each sample from logits `[B, V]`; None if all have ended.

        A sample that has ended gets tokens that do not count.

        Raises:
            NonFiniteError: a logit is NaN or Inf.
        """
        tokens = self._sampling.choose_tokens(logits, self._samples, self._place)
        self._place += 1
        for sample, token in zip(self._samples, tokens.tolist(), strict=True):
            if sample not in self._running:
                continue
            made = self.made[sample]
            made.append(token)
            if token in self._stop or (self._until is not None and self._until(sample, made)):
                self._running.remove(sample)
        return tokens if self._running and self._place < self._most else None
