"""Causal attention with grouped keys and values, forward and backward.

Queries are `[B, Hq, T, d]`, keys and values `[B, Hkv, T, d]`. The heads of a group lie one after
the other, so a group is a matrix of G*T rows against one head of keys: no kernel knows of groups,
and gradients of keys and values are contractions over G*T rows without atomics. Scores exist for a
window of them only, so memory does not grow with the square of T; backward computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.planning.vulkan_buffers import SCORE_BYTES
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.softmax import causal_softmax, causal_softmax_backward


@dataclass(frozen=True)
class ScoreWindow:
    """Scores that are computed together: heads `[first, first + heads)`, rows of each."""

    first: int
    heads: int
    """Heads of keys, over all samples."""
    row: int
    rows: int
    """Rows of a group's stacked queries."""


@dataclass(frozen=True)
class Attention:
    """The shape of one call; all methods record."""

    batch: int
    num_heads: int
    num_kv_heads: int
    length: int
    head_dim: int

    @property
    def group_rows(self) -> int:
        """Rows of the queries that share a head of keys."""
        return self.num_heads // self.num_kv_heads * self.length

    @property
    def scale(self) -> float:
        """The factor of scores (Vaswani et al., arXiv 1706.03762)."""
        return 1 / math.sqrt(self.head_dim)

    def iter_windows(self, limit: int) -> Iterator[ScoreWindow]:
        """Yield windows whose scores fit into `limit` bytes, as few as can be."""
        row_bytes = 4 * self.length
        assert row_bytes <= limit, f"one row of {self.length} scores exceeds {limit} bytes"
        heads = min(limit // (row_bytes * self.group_rows), self.batch * self.num_kv_heads)
        rows = self.group_rows if heads else limit // row_bytes
        for first in range(0, self.batch * self.num_kv_heads, max(1, heads)):
            for row in range(0, self.group_rows, rows):
                yield ScoreWindow(
                    first,
                    min(max(1, heads), self.batch * self.num_kv_heads - first),
                    row,
                    min(rows, self.group_rows - row),
                )

    def forward(
        self, graph: Graph, pool: MemoryPool, queries: Array, keys: Array, values: Array, out: Array
    ) -> None:
        """Record out `[B, Hq, T, d]` = softmax(Q K^T / sqrt(d), causal) V."""
        for window in self.iter_windows(self._limit(graph)):
            scores = self._record_probabilities(graph, pool, queries, keys, window)
            self._record_product(graph, window, scores, values, out)
            pool.give_back(scores)

    def backward(
        self,
        graph: Graph,
        pool: MemoryPool,
        queries: Array,
        keys: Array,
        values: Array,
        dout: Array,
        dqueries: Array,
        dkeys: Array,
        dvalues: Array,
    ) -> None:
        """Record all three gradients, `=`, from dout `[B, Hq, T, d]`."""
        for window in self.iter_windows(self._limit(graph)):
            scores = self._record_probabilities(graph, pool, queries, keys, window)
            dscores = self._record_scores(graph, pool, dout, values, window)
            self._reduce(graph, window, scores, dout, dvalues)
            causal_softmax_backward(
                graph, scores, dscores, first_row=window.row, length=self.length, scale=self.scale
            )
            self._record_product(graph, window, dscores, keys, dqueries)
            self._reduce(graph, window, dscores, queries, dkeys)
            pool.give_back(scores)
            pool.give_back(dscores)

    def _limit(self, graph: Graph) -> int:
        return min(graph.binding_limit, SCORE_BYTES)

    def _record_probabilities(
        self, graph: Graph, pool: MemoryPool, queries: Array, keys: Array, window: ScoreWindow
    ) -> Array:
        scores = self._record_scores(graph, pool, queries, keys, window)
        causal_softmax(graph, scores, first_row=window.row, length=self.length, scale=self.scale)
        return scores

    def _record_scores(
        self, graph: Graph, pool: MemoryPool, left: Array, right: Array, window: ScoreWindow
    ) -> Array:
        """Record left right^T `[heads, rows, T]`: queries with keys, or dout with values."""
        scores = pool.take((window.heads, window.rows, self.length))
        gemm(
            graph,
            left,
            right,
            scores,
            trans_b=True,
            m=window.rows,
            n=self.length,
            k=self.head_dim,
            batch=window.heads,
            strides=(self._group, self._head, window.rows * self.length),
            offsets=(self._compute_offset(window), window.first * self._head, 0),
        )
        return scores

    def _record_product(
        self, graph: Graph, window: ScoreWindow, scores: Array, right: Array, out: Array
    ) -> None:
        """Record the window's rows of out = scores right, over positions."""
        gemm(
            graph,
            scores,
            right,
            out,
            m=window.rows,
            n=self.head_dim,
            k=self.length,
            batch=window.heads,
            strides=(window.rows * self.length, self._head, self._group),
            offsets=(0, window.first * self._head, self._compute_offset(window)),
        )

    def _reduce(
        self, graph: Graph, window: ScoreWindow, scores: Array, left: Array, out: Array
    ) -> None:
        """Record out (+)= scores^T left, over a group's rows; later windows of rows add up."""
        gemm(
            graph,
            scores,
            left,
            out,
            trans_a=True,
            m=self.length,
            n=self.head_dim,
            k=window.rows,
            batch=window.heads,
            strides=(window.rows * self.length, self._group, self._head),
            offsets=(0, self._compute_offset(window), window.first * self._head),
            accumulate=window.row > 0,
        )

    @property
    def _group(self) -> int:
        return self.group_rows * self.head_dim

    @property
    def _head(self) -> int:
        return self.length * self.head_dim

    def _compute_offset(self, window: ScoreWindow) -> int:
        return window.first * self._group + window.row * self.head_dim
