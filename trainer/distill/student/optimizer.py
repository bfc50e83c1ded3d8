"""A student's optimizer: torch's AdamW over flat vectors on the device, clipped and checked."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from trainer.config.optimizer import OptimizerConfig
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import Snapshot, TrainState, find_decaying_spans
from trainer.replica.torch.adamw import FusedAdamW
from trainer.system.errors import NonFiniteError

_PIECE = 1 << 18
"""Numbers whose squares are summed at once. On a CPU torch sums in fp32, so what is small beside
the sum so far is lost: of 300 million normal numbers 4 % of the norm, in such pieces 1e-6."""


class StudentOptimizer:
    """AdamW (arXiv:1711.05101) on the weights `[N]` of a replica, on its device.

    As in `trainer.optimizer` only matrices decay. Torch's parameters are stretches of the flat
    vectors that either decay or do not, so a model has a few dozen of them, and both moments are
    vectors that a checkpoint stores unchanged.
    """

    def __init__(
        self, settings: OptimizerConfig, layout: GradientLayout, weights: Tensor, gradient: Tensor
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._weights, self._gradient = weights, gradient
        self._moments = torch.zeros_like(weights), torch.zeros_like(weights)
        spans = _decay_spans(layout)
        parameters = {span: nn.Parameter(weights[span.start : span.stop]) for span in spans}
        self._torch = FusedAdamW(
            settings,
            [
                ([parameters[span] for span in spans if span.decays == decays], decays)
                for decays in (True, False)
            ],
        )
        first, second = self._moments
        for span, parameter in parameters.items():
            parameter.grad = gradient[span.start : span.stop]
            self._torch.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=weights.device),
                "exp_avg": first[span.start : span.stop],
                "exp_avg_sq": second[span.start : span.stop],
            }

    @torch.no_grad()
    def restore(self, state: TrainState) -> None:
        """Resume from a checkpoint."""
        pairs = (
            (self._weights, state.weights),
            (self._moments[0], state.first_moment),
            (self._moments[1], state.second_moment),
        )
        for target, source in pairs:
            target.copy_(torch.from_numpy(source))
        self._torch.resume_at(state.step)

    def snapshot(self, step: int) -> Snapshot:
        """Return a copy of weights and moments on the host; the next update may follow."""
        first, second = self._moments
        return Snapshot(
            _copy_to_host(self._weights), _copy_to_host(first), _copy_to_host(second), step
        )

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float, weight: int) -> float:
        """Update the weights by the gradient sum over `weight` and return the mean's norm.

        Args:
            step: of this update, from 1; only for the error.

        Raises:
            NonFiniteError: the gradient has NaN or Inf; nothing was changed.
        """
        norm = float(get_total_norm(self._gradient.split(_PIECE))) / max(weight, 1)
        if not math.isfinite(norm):
            raise NonFiniteError.at_step(step, self._describe_nonfinite())
        limit = self._settings.max_grad_norm
        self._gradient.mul_((1.0 if norm <= limit else limit / norm) / max(weight, 1))
        self._torch.step(learning_rate)
        return norm

    def _describe_nonfinite(self) -> str:
        for block in self._layout.blocks:
            for slot in block.tensors:
                part = self._gradient[slot.start : slot.stop]
                if not bool(torch.isfinite(part).all()):
                    kind = "NaN" if bool(torch.isnan(part).any()) else "Inf"
                    return f"{kind} in the gradient of block {block.name}, tensor {slot.name}"
        return "the norm of the gradient overflows"


@dataclass(frozen=True)
class _Span:
    start: int
    stop: int
    decays: bool


def _decay_spans(layout: GradientLayout) -> list[_Span]:
    """Return the stretches of the flat vector that decay, and those that do not."""
    decaying = find_decaying_spans(layout)
    edges = sorted({0, layout.size, *itertools.chain.from_iterable(decaying)})
    begins = {start for start, _ in decaying}
    return [_Span(start, stop, decays=start in begins) for start, stop in itertools.pairwise(edges)]


def _copy_to_host(vector: Tensor) -> NDArray[np.float32]:
    return torch.empty_like(vector, device="cpu").copy_(vector).numpy()
