"""Softmax cross-entropy against sparse soft targets, over windows of the classes.

With targets (class c_k, probability p_k) of a row, logits and a temperature tau, z = logits / tau,

    loss = sum_k p_k (log(sum_j exp(z_j)) - z[c_k])
    d loss / d logits = ((sum_k p_k) softmax(z) - p) / tau

A label is one target of probability 1; a teacher's largest few probabilities at a temperature are
distillation (Hinton et al., arXiv 1503.02531, section 2, which multiplies by tau^2: scale the
probabilities). They need not sum to 1, so they include a row's weight; all zero means that the row
does not count.

The logits of all classes need not exist at once. `cross_entropy_start`, then one
`cross_entropy_window` a window, gather what loss and gradient need in a state `[N, 4]` (a softmax
that is normalised as it goes: Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.source import read_kernel_source

_LANES = 64  # rows of a workgroup with a lane for each row


def cross_entropy_start(graph: Graph, state: Array) -> None:
    """Record state `[N, 4]` = the state of no classes."""
    rows = state.shape[0]
    assert state.shape == (rows, 4), state.shape
    params, grid = {"rows": rows}, spread_workgroups(-(-rows // _LANES))
    graph.add(
        "cross_entropy_start", read_kernel_source("cross_entropy_start"), [state], params, grid
    )


def cross_entropy_window(
    graph: Graph,
    logits: Array,
    state: Array,
    classes: Array,
    probabilities: Array,
    *,
    first: int = 0,
    temperature: float = 1.0,
) -> None:
    """Record state `[N, 4]` += the logits `[N, W]` of classes `first` to first + W - 1.

    The targets are classes u32 `[N, K]` and probabilities `[N, K]`, f32. A row has a class once; an
    entry of probability 0 may have any.
    """
    graph.add(
        "cross_entropy_window",
        read_kernel_source("cross_entropy_window"),
        [logits, state, classes, probabilities],
        _kernel_params(logits, state, classes, probabilities, first, temperature),
        spread_workgroups(logits.shape[0]),
    )


def cross_entropy_loss(graph: Graph, state: Array, probabilities: Array, total: Array) -> None:
    """Record total `[1]` += the loss of all rows, after state `[N, 4]` covers all classes."""
    rows, targets = probabilities.shape
    assert state.shape == (rows, 4), (state.shape, probabilities.shape)
    assert total.shape == (1,), total.shape
    params = {"rows": rows, "targets": targets}
    arrays = [state, probabilities, total]
    graph.add(
        "cross_entropy_loss", read_kernel_source("cross_entropy_loss"), arrays, params, (1, 1, 1)
    )


def cross_entropy_gradient(
    graph: Graph,
    logits: Array,
    state: Array,
    classes: Array,
    probabilities: Array,
    *,
    first: int = 0,
    temperature: float = 1.0,
) -> None:
    """Record logits `[N, W]` = their gradient, after state covers all classes.

    The arguments are those of `cross_entropy_window`.
    """
    graph.add(
        "cross_entropy_gradient",
        read_kernel_source("cross_entropy_gradient"),
        [logits, state, classes, probabilities],
        _kernel_params(logits, state, classes, probabilities, first, temperature),
        spread_workgroups(logits.shape[0]),
    )


def argmax_rows(graph: Graph, x: Array, best: Array) -> None:
    """Record best u32 `[N]` = the first column with the largest value of each row of x `[N, C]`."""
    rows, width = x.shape
    assert best.shape == (rows,), (best.shape, x.shape)
    params, grid = {"rows": rows, "width": width}, spread_workgroups(-(-rows // _LANES))
    graph.add("argmax_rows", read_kernel_source("argmax_rows"), [x, best], params, grid)


def _kernel_params(
    logits: Array,
    state: Array,
    classes: Array,
    probabilities: Array,
    first: int,
    temperature: float,
) -> dict[str, float]:
    rows, width = logits.shape
    targets = classes.shape[1]
    assert state.shape == (rows, 4), (state.shape, logits.shape)
    assert classes.shape == probabilities.shape == (rows, targets), (classes, probabilities)
    return {
        "rows": rows,
        "width": width,
        "first": first,
        "targets": targets,
        "sharpness": 1 / temperature,
    }
