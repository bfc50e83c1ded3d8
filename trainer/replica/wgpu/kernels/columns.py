"""Sums over the rows of a matrix, in a fixed order.

A long matrix is summed in two stages for more parallel work: into some partial sums, then those
into one.
"""

from __future__ import annotations

from trainer.planning.vulkan_buffers import PARTIAL_SUMS
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.source import read_kernel_source


def sum_columns(graph: Graph, x: Array, sums: Array, *, accumulate: bool = False) -> None:
    """Record sums `[P, D]` = (or +=) the column sums of x `[R, D]`, R / P rows to each."""
    rows, width = x.shape
    parts = sums.shape[0]
    assert sums.shape == (parts, width), (sums.shape, x.shape)
    params = {"rows": rows, "width": width, "parts": parts}
    graph.add(
        "sum_columns",
        read_kernel_source("sum_columns"),
        [x, sums],
        params,
        spread_workgroups(parts * -(-width // 64)),
        {"ACCUMULATE": accumulate},
    )


def take_parts(pool: MemoryPool, x: Array) -> Array:
    """Return memory `[P, D]` for partial sums over x `[R, D]`."""
    return pool.take((min(x.shape[0], PARTIAL_SUMS), x.shape[1]))


def add_column_sums(graph: Graph, pool: MemoryPool, x: Array, sums: Array) -> None:
    """Record sums `[D]` += the column sums of x `[R, D]`, in two stages."""
    parts = take_parts(pool, x)
    sum_columns(graph, x, parts)
    sum_columns(graph, parts, sums.reshape(1, *sums.shape), accumulate=True)
    pool.give_back(parts)
