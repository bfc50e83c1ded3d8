"""An embedding and a head whose vocabulary tensor-parallel ranks share.

The first ranks have one token more where the sizes do not divide, as `torch.chunk` cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.planning.logit_chunks import LOGIT_ELEMENTS
from trainer.replica.torch.kd_loss import Sums, add_product
from trainer.replica.torch.linear import local_weight


class SharedEmbedding(nn.Module):
    """A lookup in this rank's rows; the others' tokens are zero until `finish` adds them up.

    Args:
        weight: this rank's rows, or all of them as a DTensor.
        first: the token of its first row.
        finish: takes this rank's `[B, T, D]`.
    """

    def __init__(
        self, weight: nn.Parameter, first: int, finish: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.weight = weight
        self._first, self._finish = first, finish

    def forward(self, ids: Tensor) -> Tensor:
        """Return what `finish` returns."""
        rows = local_weight(self.weight)
        places = ids - self._first
        mine = (places >= 0) & (places < len(rows))
        return self._finish(F.embedding(places * mine, rows) * mine[..., None])


def shared_token_losses(
    hidden: Tensor,
    head: Tensor,
    wanted: Tensor,
    *,
    first: int,
    widest: int,
    group: dist.ProcessGroup,
) -> Sums:
    """Return `token_losses` with the rows of the head on the ranks of a group.

    The gradient to `hidden` is this rank's share of it.

    Args:
        hidden: `[N, D]`, the same on all ranks.
        head: `[V / ranks, D]`.
        wanted: int64 `[N]` tokens, the same on all ranks.
        first: the token of the head's first row.
        widest: the rows of the head on the rank with the most: all reduce together, so they take
            as many tokens at once as that rank can.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows = max(1, LOGIT_ELEMENTS // widest)
    with torch.autocast(kind, enabled=False):
        trains = torch.is_grad_enabled()
        loss: Any = _TokenLosses.apply(hidden, head, wanted, first, rows, group, dtype, trains)
    return Sums(loss, loss.detach(), torch.zeros_like(loss))


class _TokenLosses(torch.autograd.Function):
    """As in `kd_loss`, the gradients are computed in forward, while the logits exist."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        wanted: Tensor,
        first: int,
        rows: int,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        trains: bool,
    ) -> Tensor:
        to_hidden, to_head = (needed and trains for needed in ctx.needs_input_grad[:2])
        hidden_gradient = torch.empty_like(hidden) if to_hidden else None
        head_gradient = torch.zeros_like(head) if to_head else None
        weight = head.to(dtype)
        loss = hidden.new_zeros((), dtype=torch.float64)
        for start in range(0, len(wanted), rows):
            part = slice(start, start + rows)
            taken = hidden[part].to(dtype)
            logits = torch.mm(taken, weight.T)
            logits = logits.to(torch.promote_types(dtype, torch.float32))
            losses, gradient = _row_losses(logits, wanted[part] - first, group)
            loss += losses.sum(dtype=torch.float64)
            gradient = gradient.to(dtype)
            if hidden_gradient is not None:
                hidden_gradient[part] = torch.mm(gradient, weight)
            if head_gradient is not None:
                add_product(head_gradient, gradient.T, taken)
        ctx.gradients = hidden_gradient, head_gradient
        return loss

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "backward runs once: it gives its buffers away"
        found = [part if part is None else part.mul_(scale) for part in ctx.gradients]
        ctx.gradients = None
        return *found, None, None, None, None, None, None


def _row_losses(logits: Tensor, wanted: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the losses `[n]` of n rows and the gradient to this rank's logits, in their memory.

    Args:
        wanted: int64 `[n]`, columns of this rank, or of another one if out of range.
    """
    peak = logits.amax(-1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    logits.sub_(peak[:, None])
    mine = (wanted >= 0) & (wanted < logits.shape[1])
    columns = (wanted * mine)[:, None]
    chosen = logits.gather(1, columns)[:, 0] * mine
    powers = logits.exp_()
    sums = torch.stack([powers.sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    total, chosen = sums
    gradient = powers.mul_((1 / total)[:, None])
    gradient.scatter_add_(1, columns, -mine[:, None].to(gradient.dtype))
    return total.log() - chosen, gradient
