"""torch's AdamW over this rank's parts, clipped by the norm over all ranks, and its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.checkpoint.stored_state import StoredState
from trainer.config.optimizer import OptimizerConfig
from trainer.model.layout import GradientLayout
from trainer.optimizer.adamw import Snapshot, Vector
from trainer.replica.torch.adamw import FusedAdamW
from trainer.replica.torch.parallel import flat_vector
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.system.errors import NonFiniteError

MOMENTS = ("exp_avg", "exp_avg_sq")


class ParallelAdamW:
    """AdamW (arXiv:1711.05101); every rank calls every method, in the same order.

    As in `trainer.optimizer.adamw`, only matrices decay.

    Args:
        parameters: this rank's parts by layout name.
        copy_counts: how many ranks hold the same part of each.
    """

    def __init__(
        self,
        settings: OptimizerConfig,
        layout: GradientLayout,
        parameters: Mapping[str, nn.Parameter],
        copy_counts: Mapping[str, int],
    ) -> None:
        self._settings, self._layout = settings, layout
        self._parameters, self._copy_counts = parameters, copy_counts
        decaying = {slot.name for slot in layout.iter_tensors() if len(slot.shape) > 1}
        groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            # torch updates a group in one call, for which its tensors must be of one mesh.
            groups.setdefault((name in decaying, _find_mesh(parameter)), []).append(parameter)
        self.torch = FusedAdamW(
            settings, [(members, decays) for (decays, _), members in groups.items()]
        )
        self.torch.reset_moments()

    @torch.no_grad()
    def apply(self, step: int, learning_rate: float) -> float:
        """Update the parameters by their gradients and return the gradient's norm over all ranks.

        Args:
            step: of this update, from 1; only for the error.

        Raises:
            NonFiniteError: the gradient has NaN or Inf; nothing was changed.
        """
        gradients = {
            name: flat_vector.local_part(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        norm = self._global_norm(gradients)
        if not math.isfinite(norm):
            raise NonFiniteError.at_step(step, self._describe_nonfinite(gradients))
        limit = self._settings.max_grad_norm
        if norm > limit:
            for gradient in gradients.values():
                gradient.mul_(limit / norm)
        self.torch.step(learning_rate)
        return norm

    def local_vectors(self) -> dict[Vector, Mapping[str, Tensor]]:
        """Return this rank's parts of the state, in the order of checkpoints."""
        first, second = (
            {name: self.torch.state[part][moment] for name, part in self._parameters.items()}
            for moment in MOMENTS
        )
        return {"weights": self._parameters, "first_moment": first, "second_moment": second}

    def snapshot(self, step: int, replica: ParallelReplica) -> Snapshot | None:
        """Return the state on rank 0, None on the others.

        Args:
            replica: whose parameters these are.
        """
        weights, first, second = map(replica.gather_parameters, self.local_vectors().values())
        if weights is None or first is None or second is None:
            return None
        return Snapshot(weights, first, second, step)

    @torch.no_grad()
    def restore(self, stored: StoredState | None, step: int) -> None:
        """Resume from the weights and moments that rank 0 reads; the others give None."""
        for vector, parts in self.local_vectors().items():
            read = partial(stored.read_slice, vector) if stored else None
            flat_vector.broadcast_tensors(self._layout, read, parts)
        self.torch.resume_at(step)

    def _global_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm over all ranks; what several hold counts once."""
        device = next(iter(gradients.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name, gradient in gradients.items():
            total += (
                torch.linalg.vector_norm(gradient, dtype=torch.float64) ** 2
                / (self._copy_counts[name])
            )
        dist.all_reduce(total)
        return math.sqrt(float(total))

    def _describe_nonfinite(self, gradients: Mapping[str, Tensor]) -> str:
        """Return the same line on every rank: the first tensor that is not finite on any."""
        names = [slot.name for slot in self._layout.iter_tensors()]
        bad = [
            place
            for place, name in enumerate(names)
            if name in gradients and not bool(torch.isfinite(gradients[name]).all())
        ]
        device = next(iter(gradients.values())).device
        first = torch.tensor(min(bad, default=len(names)), device=device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) == len(names):
            return "the norm of the gradient overflows"
        return f"NaN or Inf in the gradient of {names[int(first)]}"


def _find_mesh(parameter: Tensor) -> object:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
