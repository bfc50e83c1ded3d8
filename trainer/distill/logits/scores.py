"""A teacher's scores of a window of tokens, in one form for every scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["topk", "sampled", "full"]
RemovedTokens = Literal["tail", "first-piece"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The part of a teacher's distribution that is kept.

    `topk` keeps the most likely tokens exactly and draws some of the others, so that on average
    nothing is left out; `sampled` keeps draws alone (random-sampling KD,
    arXiv 2503.16870); `full` keeps every token, for small vocabularies.
    """

    kind: Kind
    top_k: int = 64
    """Tokens kept exactly at a position, of `topk`."""
    tail_samples: int = 8
    """Draws with replacement from tokens below the top k, of `topk`; 0 keeps their mass alone."""
    samples: int = 50
    """Draws with replacement at a position, of `sampled`."""
    temperature: float = 1.0
    """Temperature of the kept distribution: softmax(logits / temperature)."""
    removed_tokens: RemovedTokens = "tail"
    """Where the probability of the teacher's tokens went that the student's vocabulary lacks. The
    first of the student's tokens that spell each of them only in folders of earlier versions."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """A teacher's distributions over the student's vocabulary at T positions.

    Position t is the teacher's prediction of token t, as in `SoftTargets`. Position 0, and tokens
    of which nothing is learned, have no entries and zeros in every other field. A position's kept
    tokens come first, the most likely one first, then its draws by id; `full` keeps all tokens by
    id.
    """

    offsets: NDArray[np.int64]
    """`[T + 1]`: the entries of position t are those from `offsets[t]` to `offsets[t + 1]`."""
    ids: NDArray[np.int32]
    """`[E]` student token ids."""
    logprobs: NDArray[np.float32] | None
    """`[E]` natural logarithm of the teacher's probability, at the scheme's temperature, over the
    teacher's whole vocabulary; None where only draws are kept (`sampled`)."""
    counts: NDArray[np.int32]
    """`[E]`: how often an entry was drawn; 0 for one kept exactly."""
    tail: NDArray[np.float32]
    """`[T]` probability of everything not kept exactly, dropped tokens included."""
    dropped: NDArray[np.float32]
    """`[T]` probability of teacher tokens that the student's vocabulary lacks, less what first
    pieces received (`Scheme.removed_tokens`)."""
    entropy: NDArray[np.float32]
    """`[T]` in nats, of the distribution over the student's vocabulary that the scores represent:
    `topk` spreads the dropped mass over the student's tokens below the top k, in proportion;
    `sampled` and `full` over all of the student's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Consecutive tokens of one document, and the teacher's predictions of them."""

    document: int
    """Its number in the corpus."""
    start: int
    """The window's start, in tokens of the document."""
    tokens: NDArray[np.int32]
    """`[T]` student token ids."""
    scores: Scores
