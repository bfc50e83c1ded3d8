"""The device mesh: which processes share a layer, a row of stages, or the samples."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.config.parallel import ParallelConfig

DIMENSIONS = ("pipeline", "data", "tensor")
"""From the outermost: neighbours in rank share layers, and so the fastest links."""


def make_mesh(parallel: ParallelConfig, world: int, device_type: str) -> DeviceMesh:
    """Return the mesh `[stages, copies, tensor]`; every rank calls this, in the same order.

    Args:
        world: of the default process group.
        device_type: `cpu` or `cuda`.

    Raises:
        InputError: the sizes do not multiply to the world size.
    """
    shape = parallel.pipeline.stages, parallel.count_copies(world), parallel.tensor
    return init_device_mesh(device_type, shape, mesh_dim_names=DIMENSIONS)
