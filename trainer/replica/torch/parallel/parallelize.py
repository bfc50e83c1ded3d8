"""The strategies, applied to a loaded model in one order.

Each step only sees what the one before it left: first the layers are cut, then they forget their
activations, then copies of what is left share the samples.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer.config.run import RunConfig
from trainer.replica.torch import kd_loss
from trainer.replica.torch.decoder import Decoder
from trainer.replica.torch.model import recompute_activations
from trainer.replica.torch.parallel.losses import Losses
from trainer.replica.torch.parallel.tensor import TensorParallel


class Parallelized(NamedTuple):
    """A model that was cut for a rank."""

    module: nn.Module
    """Its forward takes a `MicroBatch` and returns what `Losses` returns."""
    summed: frozenset[str]
    """Parameters of the model whose gradients are still to be summed over the mesh's `tensor`."""


def parallelize(
    model: Decoder,
    config: RunConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    recompute: bool,
) -> Parallelized:
    """Cut a model for this rank, in place; every rank of the mesh calls this, with equal weights.

    Args:
        mesh: of `mesh.make_mesh`.
        recompute: gradient checkpointing.
    """
    summed, token_losses = frozenset[str](), kd_loss.token_losses
    if config.parallel.tensor > 1:
        tensor = TensorParallel(mesh["tensor"], sequence=config.parallel.sequence)
        summed, token_losses = tensor.apply(model), tensor.losses
    if recompute:
        recompute_activations(model)
    module: nn.Module = Losses(model, config, device, token_losses)
    if mesh["data"].size() > 1 and config.parallel.data == "fsdp":
        _fsdp(module, model, mesh["data"])
    elif mesh["data"].size() > 1:
        module = _ddp(module, mesh["data"])
    return Parallelized(module, summed)


def _fsdp(losses: nn.Module, model: Decoder, mesh: DeviceMesh) -> None:
    """Shard the parameters: each layer is gathered for its forward, and again for its backward.

    What remains, the embedding, the last norm and the head, is gathered once a step.
    """
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(losses, mesh=mesh)


def _ddp(losses: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Average the gradients, in buckets, while backward still runs."""
    return DistributedDataParallel(
        losses,
        process_group=mesh.get_group(),
        # All ranks have proved that they read the same weights.
        init_sync=False,
        broadcast_buffers=False,
        gradient_as_bucket_view=True,
    )
