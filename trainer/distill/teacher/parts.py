"""A teacher in two parts: what makes hidden states, and what makes logits of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


class Parts(NamedTuple):
    """A model in two parts, so that the logits of all positions never exist at once."""

    model: nn.Module
    backbone: Callable[[Tensor], Tensor]
    """Hidden states `[B, T, D]` of token ids `[B, T]`."""
    head: Callable[[Tensor], Tensor]
    """Logits `[n, vocab_size]` of some of the hidden states, `[n, D]`."""
    vocab_size: int
