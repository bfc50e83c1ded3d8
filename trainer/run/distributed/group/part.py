"""One process's part of a replica group's model, and the collectives between the parts.

`ddp`: every process has the whole model and takes some of a shard's samples. A block's gradients
are summed into the leader's as soon as the block is final, so the sum runs beside the backward as
in DistributedDataParallel; only the leader, which hands blocks to the exchange, needs it.

`fsdp`: the processes share the weights as well. `tensor`: they share every layer of one copy of the
model, and so take the same samples. Both are `trainer/replica/torch/parallel`, and the leader
gathers the gradient once the backward is over.

The order of a sum is that of the ranks in gloo's and NCCL's rings, so it is the same at every step.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.distributed as dist

from trainer.model.layout import GradientLayout, build_layout
from trainer.replica.backend import UnusableError, find_cuda_device
from trainer.replica.base import EvalResult, OnBlock, StepResult
from trainer.replica.torch.recomputation import agree_on_recomputation
from trainer.replica.torch.replica import TorchReplica
from trainer.run.distributed import flight_recorder
from trainer.run.distributed.group.setup import GroupSetup
from trainer.run.distributed.process_group import choose_collectives
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.data.tokens import Encoded


_PIECE = 1 << 22
"""Weights that are broadcast at once."""


class GroupPart(Protocol):
    """Every method is called by all processes of the group together.

    What `train` and `evaluate` return adds up over the processes.
    """

    def train(
        self, samples: Sequence[Encoded], on_block: OnBlock | None, alpha: float | None
    ) -> StepResult:
        """Run this process's samples; the leader's `on_block` gets the sums of the group.

        An exception of `on_block` is raised at a point that all processes reach.
        """
        ...

    def evaluate(self, samples: Sequence[Encoded]) -> EvalResult:
        """Run only the forward pass over this process's samples."""
        ...

    def write_trainable(self, flat: np.ndarray) -> None:
        """Copy fp32 `[layout.size]`, the same in all processes, into the trainable weights."""
        ...


def open_part(setup: GroupSetup, rank: int) -> GroupPart:
    """Join the group and load this process's part of the model.

    Raises:
        InputError: the device is not available, or the model cannot be used or does not fit.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    flight_recorder.record_collectives(Path(setup.config.output))
    layout, device = build_layout(setup.model_dir, setup.config), _device_of_rank(setup, rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(
        choose_collectives(torch.device(device)),
        store=dist.FileStore(setup.store, len(setup.devices)),  # pyright: ignore[reportPrivateImportUsage]  # documented
        rank=rank,
        world_size=len(setup.devices),
        timeout=timedelta(seconds=setup.config.parallel.timeout),
    )
    if setup.strategy == "ddp":
        return CopiedPart(setup, layout, device)
    return ShardedPart(setup, layout, device, rank)


def broadcast_weights(layout: GradientLayout, flat: np.ndarray | None) -> np.ndarray:
    """Return the leader's weights, fp32 `[layout.size]`; the others pass None.

    They go in pieces: a copy of all would be the most that a leader holds.
    """
    weights = np.empty(layout.size, np.float32) if flat is None else flat
    for start in range(0, layout.size, _PIECE):
        part = weights[start : start + _PIECE]
        piece = torch.empty(part.size)  # torch's memory: gloo's threads may free it last
        if flat is not None:
            piece.numpy()[:] = part
        dist.broadcast(piece, 0)
        if flat is None:
            part[:] = piece.numpy()
    return weights


class CopiedPart:
    """The whole model, of which each process has one."""

    def __init__(self, setup: GroupSetup, layout: GradientLayout, device: str) -> None:
        self._replica = TorchReplica(setup.model_dir, setup.config, layout, device, setup.threads)
        # By block, until the next step: gloo's threads may let go of a tensor after its collective
        # has ended, and must not be the last to hold an array of Python's.
        self._lent: dict[int, torch.Tensor] = {}

    def train(
        self, samples: Sequence[Encoded], on_block: OnBlock | None, alpha: float | None
    ) -> StepResult:
        """See `GroupPart.train`: an exception is raised once the last block is summed."""
        failed: list[BaseException] = []

        def on_block_summed(index: int, gradient: np.ndarray) -> None:
            self._lent[index] = torch.from_numpy(gradient)
            dist.reduce(self._lent[index], 0)
            if on_block is not None and not failed:
                try:
                    on_block(index, gradient)
                except BaseException as error:  # the other processes do not know of it
                    failed.append(error)

        result = self._replica.forward_backward(samples, on_block_summed, alpha)
        if failed:
            raise failed[0]
        return result

    def evaluate(self, samples: Sequence[Encoded]) -> EvalResult:
        """See `GroupPart.evaluate`."""
        return self._replica.evaluate(samples)

    def write_trainable(self, flat: np.ndarray) -> None:
        """See `GroupPart.write_trainable`."""
        self._replica.write_trainable(flat)


class ShardedPart:
    """A model of which each process has a share of the weights."""

    def __init__(self, setup: GroupSetup, layout: GradientLayout, device: str, rank: int) -> None:
        from trainer.replica.torch.parallel.mesh import make_mesh
        from trainer.replica.torch.parallel.replica import ParallelReplica

        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self._layout, self._is_leader = layout, rank == 0
        place = torch.device(device)
        config = setup.config.model_copy(update={"parallel": setup.parallel})
        self._replica = ParallelReplica(
            setup.model_dir,
            config,
            layout,
            make_mesh(setup.parallel, len(setup.devices), place.type),
            place,
            recompute=agree_on_recomputation(config, setup.model_dir, place),
        )

    def train(
        self, samples: Sequence[Encoded], on_block: OnBlock | None, alpha: float | None
    ) -> StepResult:
        """See `GroupPart.train`: the blocks leave once the gradient is gathered."""
        del alpha
        result = self._replica.accumulate(samples)
        mean = self._replica.gather_gradient()
        if mean is None:
            return replace(result, loss_sum=0.0, weight=0)  # the leader's has them
        if on_block is not None:
            mean *= result.weight
            for index in self._layout.send_order:
                block = self._layout.blocks[index]
                on_block(index, mean[block.start : block.stop])
        return result

    def evaluate(self, samples: Sequence[Encoded]) -> EvalResult:
        """See `GroupPart.evaluate`."""
        result = self._replica.evaluate(samples)
        return result if self._is_leader else EvalResult(0.0, 0, None)

    def write_trainable(self, flat: np.ndarray) -> None:
        """See `GroupPart.write_trainable`."""
        self._replica.write_trainable(flat)


def _device_of_rank(setup: GroupSetup, rank: int) -> str:
    if setup.backend == "cpu":
        return "cpu"
    try:
        return find_cuda_device(setup.devices[rank])
    except UnusableError as error:
        raise InputError(
            f"rank {rank} of the group on {socket.gethostname()}: the device "
            f"{setup.devices[rank]} is not available: {error}"
        ) from None
