"""The bias of a linear layer, forward and backward."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.columns import add_column_sums
from trainer.replica.wgpu.kernels.source import kernel_source

_LANES = 256  # elements of a workgroup


def add_bias(graph: Graph, y: Array, bias: Array) -> None:
    """Record y `[R, D]` += bias `[D]`, in every row."""
    width = y.shape[1]
    assert bias.shape == (width,), (bias.shape, y.shape)
    params, grid = {"size": y.size, "width": width}, spread_workgroups(-(-y.size // _LANES))
    graph.add("add_bias", kernel_source("add_bias"), [bias, y], params, grid)


def bias_gradient(graph: Graph, pool: MemoryPool, dy: Array, dbias: Array) -> None:
    """Record dbias `[D]` += the column sums of dy `[R, D]`."""
    add_column_sums(graph, pool, dy, dbias)
