"""Choose the next token: the likeliest, or a random one, the same on every backend.

NumPy draws, never a backend: a draw depends on seed, sample and place alone, so neither batches
nor devices change it, as far as their logits agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer.system.errors import InputError, NonFiniteError

Logits = NDArray[np.float32]

_COLDEST = 1e-60
"""As cold as any lower temperature: two float32 differ by at least 1.4e-45, and of minus that,
divided by it, `exp` is 0 already; and no float32 divided by it is Inf in float64."""


@dataclass(frozen=True)
class Sampling:
    """The choice of tokens.

    Raises:
        InputError: a setting is out of its range.
    """

    temperature: float = 0.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Only this many of the likeliest tokens may be drawn."""
    top_p: float | None = None
    """Only the fewest likeliest tokens that together have at least this probability may be drawn
    (nucleus sampling, Holtzman et al., arXiv 1904.09751); after `top_k`."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be a number from 0 up, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p must be above 0 and at most 1, got {self.top_p}")

    def choose_tokens(
        self, logits: Logits, samples: Sequence[int], place: int
    ) -> NDArray[np.int64]:
        """Return the next token `[B]` of each sample.

        Args:
            logits: `[B, V]`.
            samples: the samples' numbers, `[B]`.
            place: how many tokens were generated before.

        Raises:
            NonFiniteError: a logit is NaN or Inf.
        """
        _check_shapes(logits, samples, place)
        if self.temperature == 0:
            return logits.argmax(axis=1)
        drawn = [
            self._draw_token(row, sample, place)
            for row, sample in zip(logits, samples, strict=True)
        ]
        return np.array(drawn, np.int64)

    def _draw_token(self, logits: Logits, sample: int, place: int) -> int:
        """Return a token by the inverse of the distribution function, likeliest tokens first."""
        order = np.argsort(-logits, kind="stable")[: self.top_k]
        scaled = logits[order].astype(np.float64) / max(self.temperature, _COLDEST)
        sums = np.cumsum(np.exp(scaled - scaled[0]))
        if self.top_p is not None:
            sums = sums[: int(np.searchsorted(sums, self.top_p * sums[-1])) + 1]
        point = _draw_uniform(self.seed, sample, place) * sums[-1]
        # A product that rounds up to the last sum would be beyond the end.
        return int(order[min(int(np.searchsorted(sums, point, side="right")), len(sums) - 1)])


@dataclass(frozen=True)
class ScoredSampling(Sampling):
    """Draws for some samples of a larger set, and keeps the log-probability of each token."""

    numbers: Sequence[int] = ()
    """The samples' numbers in the larger set, on which the draws depend."""
    vocabulary: int | None = None
    """Only tokens below it may be chosen: a model may have more rows than its tokenizer has tokens
    (a padded vocabulary). None: all."""
    logprobs: dict[tuple[int, int], float] = field(
        default_factory=dict[tuple[int, int], float], compare=False
    )
    """By sample and place, in nats: over the whole vocabulary, at temperature 1."""

    def choose_tokens(
        self, logits: Logits, samples: Sequence[int], place: int
    ) -> NDArray[np.int64]:
        """See `Sampling.choose`."""
        _check_shapes(logits, samples, place)
        known, numbers = logits[:, : self.vocabulary], [self.numbers[each] for each in samples]
        tokens = super().choose_tokens(known, numbers, place)
        powers = logits - logits.max(axis=1, keepdims=True)
        chosen = powers[np.arange(len(tokens)), tokens]
        found = chosen - np.log(np.exp(powers).sum(axis=1, dtype=np.float64))
        self.logprobs.update(
            ((sample, place), value) for sample, value in zip(samples, found.tolist(), strict=True)
        )
        return tokens


def _check_shapes(logits: Logits, samples: Sequence[int], place: int) -> None:
    spoilt = np.flatnonzero(~np.isfinite(logits).all(axis=1))
    if len(spoilt):
        raise NonFiniteError(
            f"sample {samples[spoilt[0]]}: NaN or Inf among the logits of new token {place};"
            " the weights are damaged, or too large for this backend"
        )


def _draw_uniform(seed: int, sample: int, place: int) -> float:
    """Return one draw of U[0, 1): Philox (Salmon et al., SC11) with a key for seed and sample."""
    key = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(key, "little"), counter=place)
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
