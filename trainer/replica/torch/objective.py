"""What is minimised, summed over samples or over valid target tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.replica.torch.batch import IGNORED, MicroBatch
from trainer.replica.torch.kd_loss import KDWeights, Sums, token_losses


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


def language(
    model: Any, batch: MicroBatch, autocast: torch.autocast, mix: KDWeights | None = None
) -> tuple[Sums, int]:
    """Return the losses `[]` summed over the valid target tokens, and how many those are.

    Args:
        mix: how the batch's soft targets count; None for cross-entropy alone.
    """
    targets = batch.labels[:, 1:]
    # Before the forward: finding them makes the host wait for the device.
    rows, places = (targets != IGNORED).nonzero(as_tuple=True)
    wanted = targets[rows, places]
    soft = None if mix is None else batch.soft
    with autocast:
        hidden = _hidden(model, batch)[rows, places]  # [N, D]: the head runs where it counts
        return token_losses(hidden, model.lm_head.weight, wanted, soft, mix), len(wanted)


def _hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Return the final hidden states `[B, T, D]`.

    No attention mask: with padding on the right, causal attention never lets a real token see
    one, and without a mask SDPA takes its fast causal kernels. Where positions start again,
    transformers itself keeps the samples of a row apart.
    """
    output = model.model(input_ids=batch.input_ids, position_ids=batch.positions, use_cache=False)
    return output.last_hidden_state
