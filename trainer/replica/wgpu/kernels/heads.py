"""From rows of all heads to a matrix a head, with head norm and rotary positions, and back.

Rows are `[B * T, H * d]`, as linear layers return them; attention takes `[B, H, T, d]`. Queries and
keys may also get an RMSNorm (Qwen3) and a rotary position embedding (Su et al., arXiv 2104.09864),
which turns the pairs of a head's two halves, as in Llama.
"""

from __future__ import annotations

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.norm import rms_norm_weight_gradient
from trainer.replica.wgpu.kernels.source import read_kernel_source

Rope = tuple[Array, Array]
"""Cosines and sines `[positions, d / 2]`."""


def split_heads(
    graph: Graph,
    x: Array,
    out: Array,
    *,
    norm: Array | None = None,
    rope: Rope | None = None,
    eps: float = 0.0,
    starts: Array | None = None,
    cached: bool = False,
) -> None:
    """Record out `[B, H, T, d]` = the heads of x `[B * T, H * d]`, normalised and turned.

    Args:
        graph: where to record.
        x: the rows.
        out: the heads; with `cached` `[B, H, slots, d]`.
        norm: weight `[d]` of an RMSNorm over a head; None for none.
        rope: angles by position; None turns nothing.
        eps: of the norm.
        starts: u32 `[B]`, the position of each sample's first row; None is 0. Its values may change
            between runs of a recording, as in token by token generation.
        cached: a row is written to the slot of its position, and other slots do not change.
    """
    batch, heads, slots, head_dim = out.shape
    length = x.shape[0] // batch
    assert x.shape == (batch * length, heads * head_dim), (x.shape, out.shape)
    assert length <= slots if cached else length == slots, (x.shape, out.shape)
    assert starts is None or starts.shape == (batch,), starts
    _check_head(norm, rope, head_dim)
    cosines, sines = rope or (x, x)  # x is a placeholder for arrays that are not read
    rows = batch * length * heads
    graph.add(
        "split_heads",
        read_kernel_source("split_heads"),
        [x, norm or x, cosines, sines, starts or x, out],
        {
            "rows": rows,
            "heads": heads,
            "length": length,
            "head_dim": head_dim,
            "slots": slots,
            "eps": eps,
        },
        spread_workgroups(rows),
        {
            "NORM": norm is not None,
            "ROPE": rope is not None,
            "STARTS": starts is not None,
            "CACHED": cached,
        },
    )


def split_heads_backward(
    graph: Graph,
    x: Array,
    dout: Array,
    dx: Array,
    *,
    norm: Array | None = None,
    rope: Rope | None = None,
    eps: float = 0.0,
) -> None:
    """Record dx `[B * T, H * d]` = the gradient of x, from dout `[B, H, T, d]`.

    The arguments are those of `split_heads`, all starts 0; x is read if there is a norm.
    """
    assert x.shape == dx.shape, (x.shape, dx.shape)
    _record_merge(graph, dout, x, dx, norm=norm, rope=rope, eps=eps)


def head_norm_gradient(
    graph: Graph,
    pool: MemoryPool,
    x: Array,
    dout: Array,
    dweight: Array,
    *,
    rope: Rope | None = None,
    eps: float,
) -> None:
    """Record dweight `[d]` += the gradient of the norm's weight in `split_heads`."""
    head_dim = dout.shape[3]
    turned = pool.take((x.size // head_dim, head_dim))
    _record_merge(graph, dout, x, turned.reshape(*x.shape), norm=None, rope=rope, eps=eps)
    rows = x.reshape(*turned.shape)
    rms_norm_weight_gradient(graph, pool, rows, turned, dweight, eps=eps)
    pool.give_back(turned)


def merge_heads(graph: Graph, x: Array, y: Array) -> None:
    """Record y `[B * T, H * d]` = the heads x `[B, H, T, d]` side by side."""
    _record_merge(graph, x, x, y, norm=None, rope=None, eps=0.0)


def merge_heads_backward(graph: Graph, dy: Array, dx: Array) -> None:
    """Record dx `[B, H, T, d]` = the heads of dy `[B * T, H * d]`."""
    split_heads(graph, dy, dx)


def _record_merge(
    graph: Graph,
    dout: Array,
    x: Array,
    dx: Array,
    *,
    norm: Array | None,
    rope: Rope | None,
    eps: float,
) -> None:
    batch, heads, length, head_dim = dout.shape
    assert dx.shape == (batch * length, heads * head_dim), (dout.shape, dx.shape)
    _check_head(norm, rope, head_dim)
    cosines, sines = rope or (dout, dout)
    rows = batch * length * heads
    graph.add(
        "merge_heads",
        read_kernel_source("merge_heads"),
        [dout, x, norm or dout, cosines, sines, dx],
        {"rows": rows, "heads": heads, "length": length, "head_dim": head_dim, "eps": eps},
        spread_workgroups(rows),
        {"NORM": norm is not None, "ROPE": rope is not None},
    )


def _check_head(norm: Array | None, rope: Rope | None, head_dim: int) -> None:
    assert norm is None or norm.shape == (head_dim,), norm
    for table in rope or ():
        assert head_dim % 2 == 0, head_dim
        assert table.shape[1:] == (head_dim // 2,), (table.shape, head_dim)
