"""Decide whether a replica recomputes its layers: by its setting, or by memory (`auto`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.config.run import RunConfig
from trainer.model.safetensors_headers import read_headers
from trainer.planning.model_config import read_shape
from trainer.planning.replica import choose_recomputation, most_tokens, shared_memory_needed
from trainer.replica.torch.device import available_bytes, spare_memory

log = logging.getLogger(__name__)


def needs_recomputation(
    config: RunConfig, device: torch.device, needed: Callable[[], int], available: int
) -> bool:
    """Return whether layers are computed twice, and log why if memory decides.

    Args:
        needed: as for `choose_recomputation`.
    """
    choice = choose_recomputation(config, needed, available, accelerator=device.type == "cuda")
    if choice.reason:
        log.info("%s: %s", device, choice.reason)
    return choice.on


def import_checkpoint() -> None:
    """Import what torch's checkpoint needs at its first use: 70 MB that no plan knows of."""
    import torch._dynamo  # noqa: F401 - the import is the purpose


def agree_on_recomputation(config: RunConfig, model_dir: Path, device: torch.device) -> bool:
    """Return the same for all processes of the default group, which share a model.

    They gather and send layer by layer, so that all do it if memory is short on one.
    """
    needed = partial(
        shared_memory_needed,
        read_shape(model_dir),
        read_headers(model_dir),
        config,
        dist.get_world_size(),
        accelerator=device.type == "cuda",
        recompute=False,
    )
    free = available_bytes(device)
    mine = needs_recomputation(config, device, needed, free)
    spare_memory(device, needed(tokens=most_tokens(config)), free)
    any_of_them = torch.tensor(int(mine))
    dist.all_reduce(any_of_them, dist.ReduceOp.MAX)
    return bool(any_of_them)
