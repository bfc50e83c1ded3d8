"""Elementwise operations; arrays may exceed the span of a kernel argument."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import kernel_source

_LANES = 256  # elements of a workgroup


def copy(graph: Graph, x: Array, y: Array) -> None:
    """Record y = x, of one shape."""
    assert x.shape == y.shape, (x.shape, y.shape)
    _record_elementwise(graph, "copy", [x, y])


def fill(graph: Graph, y: Array, *, value: float) -> None:
    """Record y = value, for all elements."""
    _record_elementwise(graph, "fill", [y], value=value)


def _record_elementwise(graph: Graph, name: str, arrays: list[Array], **settings: float) -> None:
    columns = [array.reshape(array.size, 1) for array in arrays]
    for start, stop in iterate_windows(columns[0], graph.binding_limit):
        size = stop - start
        params = {"size": size, **settings}
        parts = [column.rows(start, stop) for column in columns]
        graph.add(name, kernel_source(name), parts, params, spread_workgroups(-(-size // _LANES)))
