"""Softmax of attention scores under the causal mask, forward and backward.

A matrix of scores has a row for each query of each head that shares its keys: consecutive heads of
`length` positions each. Scores may be a window of those rows, from `first_row` on.
"""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source


def causal_softmax(
    graph: Graph, scores: Array, *, length: int, scale: float, first_row: int = 0
) -> None:
    """Record scores `[Z, R, length]` = softmax(scale * scores) of the keys that a row may see.

    Row r is at position (first_row + r) % length and sees the keys up to itself; all others get 0.
    """
    graph.add(
        "causal_softmax",
        read_kernel_source("causal_softmax"),
        [scores],
        _kernel_params(scores, length, scale, first_row),
        spread_workgroups(scores.shape[0] * scores.shape[1]),
    )


def causal_softmax_backward(
    graph: Graph,
    probabilities: Array,
    gradient: Array,
    *,
    length: int,
    scale: float,
    first_row: int = 0,
) -> None:
    """Record gradient `[Z, R, keys]` = the scores' gradient, in place of the probabilities'.

    Both are `[Z, R, length]`; the settings are those of `causal_softmax`.
    """
    assert probabilities.shape == gradient.shape, (probabilities.shape, gradient.shape)
    graph.add(
        "causal_softmax_backward",
        read_kernel_source("causal_softmax_backward"),
        [probabilities, gradient],
        _kernel_params(gradient, length, scale, first_row),
        spread_workgroups(gradient.shape[0] * gradient.shape[1]),
    )


def cached_softmax(
    graph: Graph, starts: Array, scores: Array, *, length: int, scale: float
) -> None:
    """Record scores `[Z, G * length, slots]` = softmax(scale * scores), for cached keys.

    Query t of sample b sees starts[b] + t + 1 keys: those before its sample's queries, and from
    these up to itself. starts are u32 `[B]`, B dividing Z; their values may change between runs of
    a recording, as in token by token generation.
    """
    matrices, matrix_rows, width = scores.shape
    assert matrices % starts.shape[0] == 0, (matrices, starts.shape)
    assert matrix_rows % length == 0, (matrix_rows, length)
    rows = matrices * matrix_rows
    params = {
        "rows": rows,
        "sample_rows": rows // starts.shape[0],
        "width": width,
        "length": length,
        "scale": scale,
    }
    code = read_kernel_source("cached_softmax")
    graph.add("cached_softmax", code, [starts, scores], params, spread_workgroups(rows))


def _kernel_params(scores: Array, length: int, scale: float, first_row: int) -> dict[str, float]:
    matrices, matrix_rows, width = scores.shape
    assert length == width, (length, scores.shape)
    rows = matrices * matrix_rows
    return {
        "rows": rows,
        "matrix_rows": matrix_rows,
        "width": width,
        "first_row": first_row,
        "length": length,
        "scale": scale,
    }
