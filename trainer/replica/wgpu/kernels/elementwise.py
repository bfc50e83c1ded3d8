"""Elementwise operations; what is copied or filled may exceed the span of a kernel argument."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source

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
        parts = [column.slice_rows(start, stop) for column in columns]
        graph.add(
            name, read_kernel_source(name), parts, params, spread_workgroups(-(-size // _LANES))
        )


def add_bias(graph: Graph, y: Array, bias: Array) -> None:
    """Record y `[R, D]` += bias `[D]`, in every row."""
    width = y.shape[1]
    assert bias.shape == (width,), (bias.shape, y.shape)
    params, grid = {"size": y.size, "width": width}, spread_workgroups(-(-y.size // _LANES))
    graph.add("add_bias", read_kernel_source("add_bias"), [bias, y], params, grid)


def swiglu(graph: Graph, gate: Array, up: Array, y: Array) -> None:
    """Record y = silu(gate) * up (Shazeer, arXiv 2002.05202); all of one shape."""
    assert gate.shape == up.shape == y.shape, (gate.shape, up.shape, y.shape)
    params, grid = {"size": y.size}, spread_workgroups(-(-y.size // _LANES))
    graph.add("swiglu", read_kernel_source("swiglu"), [gate, up, y], params, grid)


def swiglu_backward(graph: Graph, gate: Array, up: Array, dy: Array) -> None:
    """Record gate and up = their gradients, from dy; overwrites their values."""
    assert gate.shape == up.shape == dy.shape, (gate.shape, up.shape, dy.shape)
    params, grid = {"size": dy.size}, spread_workgroups(-(-dy.size // _LANES))
    graph.add(
        "swiglu_backward", read_kernel_source("swiglu_backward"), [dy, gate, up], params, grid
    )
