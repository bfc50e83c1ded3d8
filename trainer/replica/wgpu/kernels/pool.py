"""Gather and scatter rows."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source

SKIPPED = 0xFFFFFFFF
"""An index of no row."""


def gather_rows(graph: Graph, table: Array, index: Array, out: Array) -> None:
    """Record out `[N, D]` = rows of table `[R, D]`, f32 or bf16, by index u32 `[N]`.

    `SKIPPED` gives zeros; any other index is below R. The table may exceed the span of a kernel
    argument.
    """
    width = table.shape[1]
    assert index.shape == out.shape[:1], (index.shape, out.shape)
    assert out.shape[1:] == (width,), (out.shape, table.shape)
    assert table.kind in ("f32", "bf16"), table.kind
    for start, stop in iterate_windows(table, graph.binding_limit):
        graph.add(
            "gather_rows",
            read_kernel_source("gather_rows"),
            [table.slice_rows(start, stop), index, out],
            {"count": index.size, "width": width, "first": start, "rows": stop - start},
            spread_workgroups(index.size),
            {"BF16": table.kind == "bf16"},
        )


def scatter_rows(graph: Graph, x: Array, index: Array, out: Array) -> None:
    """Record rows of out `[R, D]` = x `[N, D]`, by index u32 `[N]`; other rows do not change.

    No index occurs twice, except `SKIPPED`, whose rows are dropped.
    """
    rows, width = out.shape
    assert index.shape == x.shape[:1], (index.shape, x.shape)
    assert x.shape[1:] == (width,), (x.shape, out.shape)
    params = {"count": index.size, "width": width, "rows": rows}
    graph.add(
        "scatter_rows",
        read_kernel_source("scatter_rows"),
        [x, index, out],
        params,
        spread_workgroups(index.size),
    )
