"""What is minimised: cross-entropy summed over samples or over valid target tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.memory import LOGIT_ELEMENTS
from trainer.replica.torch_batch import IGNORED, MicroBatch


def classify(model: Any, batch: MicroBatch, autocast: torch.autocast) -> tuple[Tensor, Tensor]:
    """Return the summed loss `[]` and the logits `[B, C]` of a sequence classifier.

    The last token is found by length, not by comparing with the pad token as transformers does:
    many tokenizers pad with a token that also ends texts.
    """
    with autocast:
        hidden = _hidden(model, batch)
    last = (batch.lengths - 1).clamp(min=0)
    pooled = hidden[torch.arange(len(last), device=last.device), last]
    logits = model.score(pooled.float())  # the head is a trainable fp32 weight
    return F.cross_entropy(logits, batch.labels, reduction="sum"), logits


def language(model: Any, batch: MicroBatch, autocast: torch.autocast) -> tuple[Tensor, int]:
    """Return the loss `[]` summed over the valid target tokens, and how many those are."""
    targets = batch.labels[:, 1:]
    valid = targets != IGNORED
    with autocast:
        hidden = _hidden(model, batch)[:, :-1][valid]  # [N, D]: the head runs where it counts
        wanted = targets[valid]
        rows = max(1, LOGIT_ELEMENTS // model.config.vocab_size)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(wanted), rows):
            part = (model.lm_head, hidden[start : start + rows], wanted[start : start + rows])
            if torch.is_grad_enabled() and len(wanted) > rows:
                piece = checkpoint(_token_loss, *part, use_reentrant=False)
                assert isinstance(piece, Tensor)
            else:
                piece = _token_loss(*part)
            loss = loss + piece
    # An empty sum must still reach backward.
    return loss + 0.0 * hidden.sum(dtype=torch.float32), len(wanted)


def _token_loss(head: nn.Module, hidden: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), wanted, reduction="sum")


def _hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Return the final hidden states `[B, T, D]`.

    No attention mask: with padding on the right, causal attention never lets a real token see
    one, and without a mask SDPA takes its fast causal kernels.
    """
    return model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
