"""Direct preference optimisation: the better of two answers becomes the likelier one.

    L = sum over pairs of  -log sigmoid(r_chosen - r_rejected)
    r = beta (log p(answer | prompt) - log p_ref(answer | prompt))

(Rafailov et al., arXiv:2305.18290, equation 7). The reference is the same model without its
adapters, or with those that the training began from, as TRL has it. Each pair counts once, however
long its answers are, so that losses and gradients of shares add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.families import PLAIN, Logits
from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.kd_loss import (
    differentiate_head,
    iterate_chunks,
    multiply_head,
    row_losses,
    shape_logits,
)
from trainer.replica.torch.linear import disable_adapters
from trainer.replica.torch.objective import biased_product, hidden_states
from trainer.replica.torch.streaming import StreamedHead


def pair_losses(
    model: Any,
    batch: MicroBatch,
    autocast: torch.autocast,
    beta: float,
    shape: Logits = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over P pairs, `[]`, and the rewards `[2, P]` without a gradient.

    Args:
        batch: P rows of chosen answers, and behind them those of the rejected ones, with what the
            reference finds of each.
        shape: what becomes of the head's product.
    """
    assert batch.reference is not None
    ratios = sum_likelihoods(model, batch, autocast, shape) - batch.reference
    rewards = beta * ratios.view(2, -1)
    return -F.logsigmoid(rewards[0] - rewards[1]).sum(), rewards.detach()


@contextmanager
def enter_reference(model: Any, weights: Tensor, values: Tensor | None) -> Iterator[None]:
    """Let a model be what it is compared with: its base, or its weights with other values."""
    other = disable_adapters(model) if values is None else replace_values(weights, values)
    with torch.no_grad(), other:
        yield


@contextmanager
def replace_values(weights: Tensor, values: Tensor) -> Iterator[None]:
    """Let a flat tensor, of which the parameters are views, have other values."""
    own = weights.clone()
    weights.copy_(values)
    try:
        yield
    finally:
        weights.copy_(own)


def sum_likelihoods(
    model: Any, batch: MicroBatch, autocast: torch.autocast, shape: Logits
) -> Tensor:
    """Return the log-probability of each row's target tokens together, fp64 `[B]`."""
    targets = batch.targets
    assert targets is not None, "`MicroBatch.to` finds them"
    kind = batch.input_ids.device.type
    with autocast:
        hidden = hidden_states(model, batch)[targets.rows, targets.places]
        wide = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if wide else hidden.dtype
    hidden, head = biased_product(hidden, model.lm_head)
    trains = torch.is_grad_enabled()
    found: Any = _TokenLikelihoods.apply(hidden, head, targets.wanted, shape, dtype, trains)
    # Not by `index_add`, which adds in another order each time on a GPU.
    placed = torch.zeros(batch.input_ids.shape, dtype=torch.float64, device=hidden.device)
    return placed.index_put((targets.rows, targets.places), found.double()).sum(1)


class _TokenLikelihoods(torch.autograd.Function):
    """Log-probabilities `[N]` of tokens, of whose logits a few rows exist at a time.

    A token's depends on one row of hidden states, so its slope is made in forward, while the logits
    exist, and scaled in backward. The head is frozen.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        head: Tensor | StreamedHead,
        wanted: Tensor,
        shape: Logits,
        dtype: torch.dtype,
        trains: bool,
    ) -> Tensor:
        slopes = torch.empty_like(hidden) if trains and ctx.needs_input_grad[0] else None
        head = head.to(dtype) if isinstance(head, Tensor) else head
        wide = torch.promote_types(dtype, torch.float32)
        found = torch.empty(len(wanted), dtype=wide, device=hidden.device)
        for parts in iterate_chunks(len(wanted), head, None):
            rows = [hidden[part].to(dtype) for part in parts]
            chunks = multiply_head(rows, head, trains=slopes is not None)
            for number, part in enumerate(parts):
                logits = chunks[number]
                slope = shape_logits(logits, shape)
                losses = row_losses(logits, wanted[part], None, None)
                found[part] = -losses.ce
                gradient = losses.gradient if slope is None else losses.gradient.mul_(slope)
                chunks[number] = gradient.to(dtype)
                del logits, losses, gradient  # before the next chunk takes as much
            if slopes is not None:
                for part, each in zip(parts, differentiate_head(chunks, head), strict=True):
                    slopes[part] = each.neg_()
            del chunks
        ctx.slopes = slopes
        return found

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert ctx.slopes is not None, "backward runs once: it gives its buffer away"
        found, ctx.slopes = ctx.slopes, None
        return found.mul_(scale[:, None]), None, None, None, None, None
