"""A model's continuation of a prompt, with its tokens and their scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.turns import ChatMessage


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """One of a prompt's continuations."""

    document: int
    """The prompt's number in its file."""
    sample: int
    """The number among the prompt's continuations."""
    prompt: str | tuple[ChatMessage, ...]
    """A text, or the turns before the answer."""
    text: str
    """The continuation, without what ended it, or half a character where it is cut."""
    tokens: NDArray[np.int32]
    """`[T]`: the prompt's and the new ones."""
    prompt_length: int
    """How many of them are the prompt's."""
    logprobs: NDArray[np.float32]
    """`[T - asked]` natural logarithm of the model's probability of each new token, over its whole
    vocabulary and at temperature 1."""
    ended: bool
    """The model ended it; else it has the requested length."""

    @property
    def blank(self) -> bool:
        """Whether it has no text, so that it is no data."""
        return not self.text.strip()
