"""The strategies, applied to a model in one order while it is loaded.

Each step only sees what the one before it left: first the layers are cut, then they drop their
activations, then copies of what is left share the samples.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer.config.run import RunConfig
from trainer.model.families import explain_transformers_only, logits_settings
from trainer.model.safetensors_headers import read_config
from trainer.replica.torch import kd_loss
from trainer.replica.torch.loader import load_model
from trainer.replica.torch.model import list_layers, recompute_activations
from trainer.replica.torch.parallel.losses import Losses
from trainer.replica.torch.parallel.tensor_parallel import TensorParallel


class Parallelized(NamedTuple):
    """A model of which a rank has its part."""

    module: nn.Module
    """Its forward takes a `MicroBatch` and returns what `Losses` returns."""
    model: nn.Module
    """Inside it."""
    summed: frozenset[str]
    """Parameters of the model whose gradients are still to be summed over the mesh's `tensor`."""


def parallelize(
    model_dir: Path,
    config: RunConfig,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    recompute: bool,
) -> Parallelized:
    """Load a model and cut it for this rank; every rank of the mesh calls this, with equal files.

    A layer is cut before the next one is read, so that a rank never holds more than its part of
    the layers, a whole one, and the embedding and head. transformers reads all layers first.

    Args:
        mesh: of `mesh.make_mesh`.
        recompute: gradient checkpointing.

    Raises:
        InputError: the model cannot be loaded.
    """
    tensor = None
    if config.parallel.tensor > 1:
        tensor = TensorParallel(mesh["tensor"], sequence=config.parallel.sequence)
    copies = mesh["data"]
    shards = copies.size() > 1 and config.parallel.data == "fsdp"

    def cut_layer(number: int, layer: Any) -> None:
        if tensor is not None:
            tensor.cut_layer(number, layer)
        if shards:  # it is gathered for its forward, and again for its backward
            fully_shard(layer, mesh=copies)

    # A frozen base that is whole may stay in the file; weights that train may not.
    is_kept = tensor is None and not shards and config.method != "full"
    tree = read_config(model_dir)
    whole = explain_transformers_only(tree, config.data.max_seq_len) is not None
    model: Any = load_model(model_dir, config, device, cut=None if is_kept or whole else cut_layer)
    if whole and shards:
        for number, layer in enumerate(list_layers(model)):
            cut_layer(number, layer)
    if tensor is not None:
        tensor.cut_ends(model)
    if recompute:
        recompute_activations(model)
    plain = partial(kd_loss.token_losses, shape=logits_settings(tree))
    token_losses = plain if tensor is None else tensor.token_losses
    module: nn.Module = Losses(model, config, device, token_losses)
    if shards:  # what remains, the embedding, the last norm and the head, is gathered once a step
        fully_shard(module, mesh=copies)
    elif copies.size() > 1:
        module = wrap_ddp(module, copies)
    return Parallelized(module, model, frozenset(tensor.summed if tensor else ()))


# The name of torch 2.13; the one of before is deprecated there.
_NEW = "forward_sync_buffers"
_OPTIONS = signature(DistributedDataParallel.__init__).parameters
_KEEP_BUFFERS: dict[str, Any] = {_NEW if _NEW in _OPTIONS else "broadcast_buffers": False}


def wrap_ddp(losses: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Average the gradients, in buckets, while backward still runs."""
    return DistributedDataParallel(
        losses,
        process_group=mesh.get_group(),
        # All ranks have proved that they read the same weights.
        init_sync=False,
        **_KEEP_BUFFERS,
        gradient_as_bucket_view=True,
    )
