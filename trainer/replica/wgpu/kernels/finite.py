"""Detection of NaN and Inf."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source

_LANES = 256  # elements of a workgroup


def mark_non_finite(graph: Graph, x: Array, flag: Array) -> None:
    """Record flag u32 `[1]` = 1 if any element of x, f32, is NaN or Inf; else unchanged."""
    assert x.kind == "f32", x.kind
    assert flag.shape == (1,), flag.shape
    column = x.reshape(x.size, 1)
    for start, stop in iterate_windows(column, graph.binding_limit):
        size = stop - start
        arrays = [column.slice_rows(start, stop), flag]
        params, grid = {"size": size}, spread_workgroups(-(-size // _LANES))
        graph.add("mark_non_finite", read_kernel_source("mark_non_finite"), arrays, params, grid)
