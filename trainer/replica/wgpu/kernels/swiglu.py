"""SwiGLU (Shazeer, arXiv 2002.05202), forward and backward."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import kernel_source

_LANES = 256  # elements of a workgroup


def swiglu(graph: Graph, gate: Array, up: Array, y: Array) -> None:
    """Record y = silu(gate) * up, elementwise; all of one shape."""
    assert gate.shape == up.shape == y.shape, (gate.shape, up.shape, y.shape)
    params, grid = {"size": y.size}, spread_workgroups(-(-y.size // _LANES))
    graph.add("swiglu", kernel_source("swiglu"), [gate, up, y], params, grid)


def swiglu_backward(graph: Graph, gate: Array, up: Array, dy: Array) -> None:
    """Record gate and up = their gradients, from dy; overwrites their values."""
    assert gate.shape == up.shape == dy.shape, (gate.shape, up.shape, dy.shape)
    params, grid = {"size": dy.size}, spread_workgroups(-(-dy.size // _LANES))
    graph.add("swiglu_backward", kernel_source("swiglu_backward"), [dy, gate, up], params, grid)
