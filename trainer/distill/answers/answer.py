"""A model's continuation of a prompt, with its tokens and their scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.data.shapes import Sample
from trainer.data.turns import ChatMessage
from trainer.system.errors import InputError


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
    asked: int
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


def asked_of(sample: Sample) -> str | tuple[ChatMessage, ...]:
    """Return what of a prompt's record stays before its answer, as `Encoder.prompt` reads it.

    Args:
        sample: of `read_prompts`.

    Raises:
        InputError: it has tools or calls of them, which rows of turns do not express.
    """
    if not sample.messages:
        return sample.prompt or sample.text
    if sample.tools or any(message.more for message in sample.messages):
        raise InputError(
            f"{sample.source}{sample.line}: has tools or other keys of turns; give prompts of text"
            " alone"
        )
    turns = sample.messages
    return turns[:-1] if turns[-1].role == "assistant" else turns
