"""AdamW by torch's fused kernels, without torch's compiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from trainer.config.optimizer import OptimizerConfig


class FusedAdamW:
    """AdamW (arXiv:1711.05101): the same bits as `torch.optim.AdamW(..., fused=True)`.

    That class imports torch's compiler, which is not used here and takes as long as torch itself.

    Args:
        groups: parameters, and whether they decay. A group is updated in one call, for which its
            tensors must be of one mesh.
    """

    def __init__(
        self, settings: OptimizerConfig, groups: Iterable[tuple[Sequence[nn.Parameter], bool]]
    ) -> None:
        self._settings = settings
        self._groups = list(groups)
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        """State of each parameter: both moments, `exp_avg` and `exp_avg_sq`, and `step`, the
        number of its updates in fp32 on its device."""

    def reset_moments(self) -> None:
        """Set moments and steps to zero; an owner of vectors for them sets `state` instead."""
        for members, _ in self._groups:
            for each in members:
                self.state[each] = {
                    "step": torch.zeros((), dtype=torch.float32, device=each.device),
                    "exp_avg": torch.zeros_like(each),
                    "exp_avg_sq": torch.zeros_like(each),
                }

    def resume_at(self, step: int) -> None:
        """Set how many updates the moments have seen."""
        for state in self.state.values():
            state["step"].fill_(step)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the parameters that have a gradient."""
        settings = self._settings
        for members, decays in self._groups:
            gradients = {each: each.grad for each in members if each.grad is not None}
            states = [self.state[each] for each in gradients]
            adamw(
                list(gradients),
                list(gradients.values()),
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=settings.weight_decay if decays else 0.0,
                eps=settings.epsilon,
                maximize=False,
            )
