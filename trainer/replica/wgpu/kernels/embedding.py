"""Token embedding, forward and backward.

Many rows may have the same token. So that its gradient needs no atomics and is reproducible, the
host lists the rows of each token, and one workgroup adds them in order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph, spread_workgroups
from trainer.replica.wgpu.kernels.pool import SKIPPED, gather_rows
from trainer.replica.wgpu.kernels.source import read_kernel_source

Words = NDArray[np.uint32]


def embed_tokens(graph: Graph, table: Array, ids: Array, out: Array) -> None:
    """Record out `[M, D]` = rows of table `[V, D]`, f32 or bf16, by token ids u32 `[M]`."""
    gather_rows(graph, table, ids, out)


def sort_tokens(ids: Words) -> tuple[Words, Words, Words]:
    """Return the rows of every token of ids `[M]` for `embedding_gradient`.

    They are `unique` `[M]`, the tokens in ascending order; `starts` `[M + 1]`, the first index of
    each one's rows in `order`, and the end of the last; and `order` `[M]`, the rows. Entries after
    the last token have no rows.
    """
    order = np.argsort(ids, kind="stable")
    tokens, firsts = np.unique(ids[order], return_index=True)
    unique = np.full(len(ids), SKIPPED, np.uint32)
    unique[: len(tokens)] = tokens
    starts = np.full(len(ids) + 1, len(ids), np.uint32)
    starts[: len(tokens)] = firsts
    return unique, starts, order.astype(np.uint32)


def embedding_gradient(
    graph: Graph, dy: Array, unique: Array, starts: Array, order: Array, dtable: Array
) -> None:
    """Record dtable `[V, D]` += the rows of dy `[M, D]`, each at its token; see `sort_tokens`."""
    count, width = dy.shape
    tokens = unique.size
    assert starts.shape == (tokens + 1,), (starts.shape, unique.shape)
    assert order.shape == (count,), (order.shape, dy.shape)
    assert dtable.shape[1:] == (width,), (dtable.shape, dy.shape)
    for start, stop in iterate_windows(dtable, graph.binding_limit):
        graph.add(
            "embedding_gradient",
            read_kernel_source("embedding_gradient"),
            [dy, unique, starts, order, dtable.slice_rows(start, stop)],
            {"tokens": tokens, "width": width, "first": start, "rows": stop - start},
            spread_workgroups(tokens * -(-width // 64)),
        )
