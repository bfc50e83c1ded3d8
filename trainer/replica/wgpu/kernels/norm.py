"""RMSNorm (Zhang and Sennrich, arXiv 1910.07467), forward and backward."""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.columns import sum_columns, take_parts
from trainer.replica.wgpu.kernels.source import read_kernel_source


def rms_norm(graph: Graph, x: Array, weight: Array, y: Array, *, eps: float) -> None:
    """Record y `[R, D]` = RMSNorm of x `[R, D]` with weight `[D]`."""
    rows, width = x.shape
    assert weight.shape == (width,), weight.shape
    assert y.shape == x.shape, y.shape
    params = {"rows": rows, "width": width, "eps": eps}
    graph.add(
        "rms_norm", read_kernel_source("rms_norm"), [x, weight, y], params, spread_workgroups(rows)
    )


def rms_norm_backward(
    graph: Graph,
    x: Array,
    weight: Array,
    dy: Array,
    dx: Array,
    *,
    eps: float,
    accumulate: bool = False,
) -> None:
    """Record dx `[R, D]` = (or += with `accumulate`) the gradient of x, from dy `[R, D]`."""
    rows, width = x.shape
    assert weight.shape == (width,), weight.shape
    assert dy.shape == dx.shape == x.shape, (dy.shape, dx.shape, x.shape)
    graph.add(
        "rms_norm_backward",
        read_kernel_source("rms_norm_backward"),
        [x, weight, dy, dx],
        {"rows": rows, "width": width, "eps": eps},
        spread_workgroups(rows),
        {"ACCUMULATE": accumulate},
    )


def rms_norm_weight_gradient(
    graph: Graph, pool: MemoryPool, x: Array, dy: Array, dweight: Array, *, eps: float
) -> None:
    """Record dweight `[D]` += the weight's gradient, from x and dy `[R, D]`."""
    rows, width = x.shape
    assert dy.shape == x.shape, (dy.shape, x.shape)
    assert dweight.shape == (width,), dweight.shape
    parts = take_parts(pool, x)
    params = {"rows": rows, "width": width, "parts": parts.shape[0], "eps": eps}
    code = read_kernel_source("rms_norm_weight_gradient")
    graph.add(
        "rms_norm_weight_gradient", code, [x, dy, parts], params, spread_workgroups(parts.shape[0])
    )
    sum_columns(graph, parts, dweight.reshape(1, width), accumulate=True)
    pool.give_back(parts)
