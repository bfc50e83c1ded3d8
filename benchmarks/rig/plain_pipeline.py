"""A pipeline by hand: the Llama of `rig.plain` in stages, as PyTorch's tutorial does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rig.plain import Plain, Step, rotation_of


class Part(nn.Module):
    """A stage: some of the layers, with the embedding before the first, the head after the last."""

    def __init__(self, model: Plain, rank: int, ranks: int) -> None:
        super().__init__()
        each = len(model.model.layers) // ranks
        self.layers = model.model.layers[rank * each : (rank + 1) * each]
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.norm, self.head = None, None
        if rank == ranks - 1:
            self.norm, self.head = model.model.norm, model.lm_head
        self.head_dim = model.head_dim

    def forward(self, before: Tensor) -> Tensor:
        """Return hidden states `[B, T, D]` of those before, or of ids `[B, T]`; last: logits."""
        hidden = before if self.embed is None else self.embed(before)
        rotation = rotation_of(before.shape[1], self.head_dim)
        for layer in self.layers:
            hidden = layer(hidden, rotation)
        return hidden if self.head is None or self.norm is None else self.head(self.norm(hidden))


def plain_pipeline(model: Plain, mesh: DeviceMesh, microbatches: int) -> Step:
    """Return a step of 1F1B: forward and backward of all rows `[B, T]`, as micro-batches."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    part = Part(model, rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"), group=mesh.get_group())
    schedule: Any = Schedule1F1B(stage, microbatches, loss_fn=_loss)

    def step(ids: Tensor) -> float:
        part.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        last = {"target": ids, "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*([ids] if rank == 0 else []), return_outputs=False, **last)
        total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(total, ranks - 1)
        return float(total)

    return step


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
