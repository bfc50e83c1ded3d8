"""Collectives with gradients, between the linears that tensor-parallel ranks share.

Each is the other direction's backward: `copy` and `add_up` of Megatron-LM (Shoeybi et al.,
arXiv:1909.08053, figure 3), `gather_tokens` and `scatter_tokens` of sequence parallelism
(Korthikanti et al., arXiv:2205.05198, figure 5). Tokens are the second dimension, `[B, T, D]`, and
the ranks divide T.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Step = Callable[[Tensor, Group], Tensor]

# Names of torch 2.13; those of before are deprecated there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Return `x`, which is the same on all ranks; its gradient is the sum of theirs."""
    return _Exchange.apply(x, group, _identity, _all_reduce)  # pyright: ignore[reportReturnType]


def add_up(x: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks, whose gradient is the same on all of them."""
    return _Exchange.apply(x, group, _all_reduce, _identity)  # pyright: ignore[reportReturnType]


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Return `[B, T, D]` of `[B, T / ranks, D]`; its gradient is the sum of the ranks'."""
    return _Exchange.apply(x, group, _all_gather, _summed_part)  # pyright: ignore[reportReturnType]


def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens `[B, T / ranks, D]` of the sum of the ranks' `[B, T, D]`."""
    return _Exchange.apply(x, group, _summed_part, _all_gather)  # pyright: ignore[reportReturnType]


def join_tokens(x: Tensor, group: Group) -> Tensor:
    """Return `[B, T, D]` of `[B, T / ranks, D]`; its gradient is the same on all ranks."""
    return _Exchange.apply(x, group, _all_gather, _own_part)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    """One function of a tensor and a group forward, and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Step, back: Step) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradient, ctx.group), None, None, None


def _identity(x: Tensor, _: Group) -> Tensor:
    return x.view_as(x)


def _own_part(x: Tensor, group: Group) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: Group) -> Tensor:
    mine = x.transpose(0, 1).contiguous()  # the collectives join along the first dimension
    every = mine.new_empty(mine.shape[0] * dist.get_world_size(group), *mine.shape[1:])
    all_gather(every, mine, group=group)
    return every.transpose(0, 1).contiguous()  # else each product makes a copy, and keeps it


def _summed_part(x: Tensor, group: Group) -> Tensor:
    every = x.transpose(0, 1).contiguous()
    mine = every.new_empty(every.shape[0] // dist.get_world_size(group), *every.shape[1:])
    _reduce_scatter(mine, every, group=group)
    return mine.transpose(0, 1)
