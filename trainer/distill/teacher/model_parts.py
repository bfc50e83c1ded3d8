"""A teacher in two parts: the backbone makes hidden states, the head makes logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn


class ModelParts(NamedTuple):
    """A model in two parts, so that the logits of all positions never exist at once."""

    model: nn.Module
    backbone: Callable[[Tensor], Tensor]
    """Hidden states `[B, T, D]` of token ids `[B, T]`."""
    head: Callable[[Tensor], Tensor]
    """Logits `[n, vocab_size]` of some of the hidden states, `[n, D]`."""
    vocab_size: int
