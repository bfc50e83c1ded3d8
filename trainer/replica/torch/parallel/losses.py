"""The model with its objective as one module: DDP and FSDP hook the forward that they wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.run import RunConfig
from trainer.replica.torch import objective
from trainer.replica.torch.batch import MicroBatch
from trainer.replica.torch.kd_loss import Sums, token_losses
from trainer.replica.torch.precision import make_autocast


class Losses(nn.Module):
    """Computes a micro-batch's loss, so that every use of a weight is inside its forward.

    Args:
        losses: computes those of tokens from their hidden states and the head.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        device: torch.device,
        losses: Callable[..., Sums] = token_losses,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self._losses = losses
        self._classifies = config.task == "classify"
        self._autocast = make_autocast(config, device)

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Return the loss `[]`, summed over samples or target tokens, and a classifier's logits."""
        if self._classifies:
            loss, logits = objective.classification_loss(self.model, micro, self._autocast)
            return loss, logits.detach()
        sums, _ = objective.language_loss(self.model, micro, self._autocast, losses=self._losses)
        return sums.loss, None
