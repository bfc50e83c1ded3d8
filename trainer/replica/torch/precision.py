"""The format of products, and fp16's loss scale (Micikevicius et al., arXiv:1710.03740)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.run import RunConfig

log = logging.getLogger(__name__)

SCALE_OF_SUM = 2.0**8
"""First scale of a loss that is a sum over samples or tokens: a mean over 256 has 2^16, torch's."""
SCALE_OF_MEAN = 2.0**16
_ATTEMPTS = 24
"""Computations of one gradient: after as many halvings no product overflows for its scale."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of matmuls."""
    return _DTYPES[config.resolve_precision(accelerator=device.type == "cuda")]


def make_autocast(config: RunConfig, device: torch.device) -> torch.autocast:
    """Return the context in which a model computes in `compute_dtype`."""
    dtype = compute_dtype(config, device)
    narrow = dtype != torch.float32
    return torch.autocast(device.type, dtype=dtype if narrow else None, enabled=narrow)


class LossScale:
    """The factor that keeps fp16's small gradients above zero; 1 and idle in other formats.

    A gradient that overflows is computed again with half the scale before anybody sees it, so an
    overflow costs time and nothing else. torch's scalers decide on the scale: it doubles after
    2,000 gradients without an overflow.

    Args:
        first: the scale at the start.
        ranks: the processes whose gradients are parts of one; an overflow in one is one in all.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        first: float,
        ranks: dist.ProcessGroup | None = None,
    ) -> None:
        self.on = compute_dtype(config, device) == torch.float16
        """Whether gradients must be unscaled before they leave."""
        self._device, self._ranks, self._failed = device, ranks, 0
        if ranks is None:
            self._scaler = torch.amp.GradScaler(device.type, first, enabled=self.on)
        else:
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self._scaler = ShardedGradScaler(
                device.type, first, enabled=self.on, process_group=ranks
            )
        self._scaler.scale(torch.zeros((), device=device))  # it makes its state at the first use
        self.value = self._scaler.get_scale()
        """Factor of the loss before backward."""

    def unscale_gradients(self, gradients: Sequence[Tensor], loss: Tensor) -> bool:
        """Unscale gradients in place, and return whether they are to be used.

        If not, they have overflowed and must be computed again. What no scale is the reason of is
        to be used, so that its NaN or Inf is found and named: a loss that is not finite itself, or
        a gradient that is still not after two dozen halvings.

        Args:
            gradients: fp32, this process's.
            loss: sums, unscaled.
        """
        if not self.on:
            return True
        before = self.value
        holders = [nn.Parameter(part) for part in gradients]
        for holder, part in zip(holders, gradients, strict=True):
            holder.grad = part
        self._scaler.unscale_(torch.optim.SGD(holders))
        self._scaler.update()
        self.value = self._scaler.get_scale()  # the host waits for it
        finite = torch.isfinite(loss).all().float()
        if self._ranks is not None:
            dist.all_reduce(finite, dist.ReduceOp.MIN, self._ranks)
        self._failed = self._failed + 1 if self.value < before and finite else 0
        if 0 < self._failed < _ATTEMPTS:
            if self._ranks is None or dist.get_rank(self._ranks) == 0:
                log.warning(
                    "a gradient overflowed in fp16 with loss scale %g: computed again with %g",
                    before,
                    self.value,
                )
            return False
        self._failed = 0
        return True
