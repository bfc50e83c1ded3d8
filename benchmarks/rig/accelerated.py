"""DDP and FSDP2 as Hugging Face's `accelerate` sets them up, if it is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
import torch.distributed as dist

from rig.plain import Plain, Step, step_of

STRATEGIES = ("ddp", "fsdp")


def missing() -> str | None:
    """Return why nothing can be compared with it."""
    if find_spec("accelerate") is None:
        return "accelerate is not installed: pip install accelerate"
    return None


def accelerated_step(model: Plain, strategy: str) -> Step:
    """Return a step of a model that `Accelerator.prepare` has wrapped."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(True)  # one process sets up one strategy after another
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if strategy == "fsdp":  # its own switch to it knows accelerators alone
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Layer"],
            cpu_ram_efficient_loading=False,
        )
        accelerator.state.distributed_type = DistributedType.FSDP
    module, _ = accelerator.prepare(model, optimizer)
    return step_of(module, averaged=True, backward=accelerator.backward)
