"""A rank of `ring.py`: `python -P benchmarks/rig/ring_rank.py SPEC`.

The gradient is summed as training does it, by the same DistributedDataParallel: in its buckets,
from the first that backward fills. Backward itself computes nothing but ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rig import collective, synthetic
from benchmarks.rig.member import Commands
from trainer.config.parallel import ParallelConfig
from trainer.replica.torch.parallel.mesh import make_mesh
from trainer.replica.torch.parallel.parallelize import ddp


class BucketSpec(collective.CollectiveSpec):
    """What a rank is told; it runs this file."""

    def of_rank(self, rank: int) -> list[str]:
        """Return the command line of a rank."""
        words = json.dumps(asdict(replace(self, rank=rank)))
        return [sys.executable, "-P", str(Path(__file__).absolute()), words]


class Adapter(nn.Module):
    """As many weights as the gradient has, in the tensors of the imitated model's layers."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        slots = synthetic.layout(elements).tensors()
        self.parts = nn.ParameterList(torch.zeros(slot.shape) for slot in slots)

    def forward(self) -> torch.Tensor:
        """Return a loss whose gradient is 1 everywhere."""
        return torch.stack([part.sum() for part in self.parts]).sum()


def main() -> None:
    """Sum a gradient again and again; write the stamps of each time."""
    spec = BucketSpec(**json.loads(sys.argv[1]))
    Commands()  # ends this process when the one that measures has ended
    os.environ["GLOO_SOCKET_IFNAME"] = spec.interface
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{spec.address}", rank=spec.rank, world_size=spec.world
    )
    module = ddp(Adapter(spec.elements), make_mesh(ParallelConfig(), spec.world, "cpu")["data"])
    stamps: list[dict[str, float]] = []
    for _ in range(spec.steps):
        for part in module.parameters():
            if part.grad is not None:
                part.grad.zero_()
        loss = module()
        dist.barrier()
        began = time.monotonic()
        loss.backward()
        stamps.append({"first_send": began, "last_average": time.monotonic()})
    # The mean over ranks of ones; the sums are of every rank, or it would be another number.
    right = all(bool((part.grad == 1).all()) for part in module.parameters())
    found = {"stamps": stamps, "right": right}
    spec.result(spec.rank).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
