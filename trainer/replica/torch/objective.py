"""The objective, summed over samples or valid target tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.families import PLAIN, Logits
from trainer.replica.torch.batch import IGNORED, MicroBatch
from trainer.replica.torch.kd_loss import KDWeights, Sums, token_losses
from trainer.replica.torch.model import find_backbone
from trainer.replica.torch.streaming import StreamedHead


def classification_loss(
    model: Any,
    batch: MicroBatch,
    autocast: torch.autocast,
    weights: Tensor | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the summed loss `[]` and the logits `[B, C]` of a sequence classifier.

    Args:
        weights: of the classes `[C]`; None: 1.
        smoothing: share of each target that is spread over all classes.
    """
    with autocast:
        hidden = hidden_states(model, batch)
    return class_loss(hidden, model.score, batch, weights, smoothing)


def class_loss(
    hidden: Tensor,
    score: nn.Module,
    batch: MicroBatch,
    weights: Tensor | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the same from the final hidden states `[B, T, D]`.

    The last token is found by length, not by the pad token as in transformers: many tokenizers pad
    with a token that also ends texts.
    """
    last = (batch.lengths - 1).clamp(min=0)
    pooled = hidden[torch.arange(len(last), device=last.device), last]
    logits = score(pooled.float())  # the head is a trainable fp32 weight
    loss = F.cross_entropy(
        logits, batch.labels, weights, reduction="sum", label_smoothing=smoothing
    )
    return loss, logits


def count_cells(cells: Tensor, labels: Tensor, logits: Tensor) -> None:
    """Add predictions `[B, C]` to a confusion `[C * C]`, by label and then by prediction.

    Not by `bincount`, for whose result the host waits.
    """
    counts = labels != IGNORED
    cell = (labels * logits.shape[1] + logits.argmax(-1)) * counts
    cells.scatter_add_(0, cell, counts.long())


def language_loss(
    model: Any,
    batch: MicroBatch,
    autocast: torch.autocast,
    mix: KDWeights | None = None,
    losses: Callable[..., Sums] = token_losses,
    shape: Logits = PLAIN,
) -> tuple[Sums, int]:
    """Return the losses `[]` summed over the valid target tokens, and their number.

    Args:
        mix: weights of the batch's soft targets; None for cross-entropy alone.
        losses: computes them from hidden states and the head.
        shape: what becomes of their product.
    """
    targets = batch.targets
    assert targets is not None, "`MicroBatch.to` finds them"
    soft = None if mix is None else batch.soft
    with autocast:
        hidden = hidden_states(model, batch)[
            targets.rows, targets.places
        ]  # the head runs on these alone
        more = {} if shape == PLAIN else {"shape": shape}  # other `losses` have none
        hidden, head = biased_product(hidden, model.lm_head)
        found = losses(hidden, head, targets.wanted, soft, mix, **more)
    return found, len(targets.wanted)


def biased_product(hidden: Tensor, head: Any) -> tuple[Tensor, Any]:
    """Return hidden states `[N, D]` and a matrix `[V, D]` whose product is the head's.

    A bias is one more column of the matrix, for a column of ones.
    """
    bias = getattr(head, "bias", None)
    if bias is not None:
        hidden = F.pad(hidden, (0, 1), value=1.0)
    if isinstance(head, StreamedHead):
        return hidden, head
    return hidden, head.weight if bias is None else torch.cat([head.weight, bias[:, None]], 1)


def hidden_states(model: Any, batch: MicroBatch) -> Tensor:
    """Return the final hidden states `[B, T, D]`.

    No attention mask: with padding on the right, causal attention hides it from real tokens, and
    without a mask SDPA takes its fast causal kernels. Where positions restart, transformers itself
    separates the samples of a row.
    """
    if batch.hidden is not None:
        return batch.hidden
    return last_hidden(model, batch.input_ids, batch.positions)


def last_hidden(model: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return the final hidden states `[B, T, D]` of tokens `[B, T]`."""
    more = {} if positions is None else {"position_ids": positions}  # some classes take none
    return find_backbone(model)(input_ids=ids, use_cache=False, **more).last_hidden_state
