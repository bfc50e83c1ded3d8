"""A linear layer with an optional adapter (LoRA, Hu et al., arXiv 2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.replica.wgpu.gpu.array import Array, iterate_windows
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.columns import add_column_sums
from trainer.replica.wgpu.kernels.elementwise import add_bias
from trainer.replica.wgpu.kernels.gemm.record import gemm


@dataclass(frozen=True)
class Trainable:
    """A tensor that trains."""

    weight: Array
    gradient: Array | None
    """None: the model only evaluates."""


@dataclass(frozen=True)
class Lora:
    """y += scale * (x A^T) B^T."""

    a: Array
    """`[r, in]`"""
    a_gradient: Array | None
    """None: A does not train."""
    b: Trainable
    """`[out, r]`"""
    scale: float
    """alpha / r"""

    @property
    def rank(self) -> int:
        """Columns of B."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b, W `[out, in]` frozen or trained, with an adapter or without."""

    weight: Array
    weight_gradient: Array | None = None
    bias: Array | None = None
    bias_gradient: Array | None = None
    lora: Lora | None = None

    def forward(
        self, graph: Graph, pool: MemoryPool, x: Array, y: Array, *, accumulate: bool = False
    ) -> None:
        """Record y `[M, out]` (+)= x `[M, in]` W^T + b."""
        rows, out, inner = x.shape[0], *self.weight.shape
        for start, stop in iterate_windows(self.weight, graph.binding_limit):
            gemm(
                graph,
                x,
                self.weight.slice_rows(start, stop),
                y,
                trans_b=True,
                m=rows,
                n=stop - start,
                k=inner,
                ldc=out,
                offsets=(0, 0, start),
                accumulate=accumulate,
            )
        if self.bias is not None:
            add_bias(graph, y, self.bias)
        if self.lora is not None:
            low = self._project(graph, pool, self.lora, x)
            gemm(
                graph,
                low,
                self.lora.b.weight,
                y,
                trans_b=True,
                m=rows,
                n=out,
                k=self.lora.rank,
                alpha=self.lora.scale,
                accumulate=True,
            )
            pool.give_back(low)

    def backward(
        self,
        graph: Graph,
        pool: MemoryPool,
        x: Array,
        dy: Array,
        dx: Array | None,
        *,
        accumulate: bool = False,
    ) -> None:
        """Record dx `[M, in]` (+)= dy `[M, out]` W, and `+=` into gradients; dx may be None."""
        rows, out, inner = x.shape[0], *self.weight.shape
        if dx is not None:
            for number, (start, stop) in enumerate(
                iterate_windows(self.weight, graph.binding_limit)
            ):
                gemm(
                    graph,
                    dy,
                    self.weight.slice_rows(start, stop),
                    dx,
                    m=rows,
                    n=inner,
                    k=stop - start,
                    lda=out,
                    offsets=(start, 0, 0),
                    accumulate=accumulate or number > 0,
                )
        if self.weight_gradient is not None:
            for start, stop in iterate_windows(self.weight_gradient, graph.binding_limit):
                gemm(
                    graph,
                    dy,
                    x,
                    self.weight_gradient.slice_rows(start, stop),
                    trans_a=True,
                    m=stop - start,
                    n=inner,
                    k=rows,
                    lda=out,
                    offsets=(start, 0, 0),
                    accumulate=True,
                )
        if self.bias_gradient is not None:
            add_column_sums(graph, pool, dy, self.bias_gradient)
        if self.lora is not None:
            self._adapter_backward(graph, pool, self.lora, x, dy, dx)

    def _adapter_backward(
        self, graph: Graph, pool: MemoryPool, lora: Lora, x: Array, dy: Array, dx: Array | None
    ) -> None:
        rows, out, inner, rank = x.shape[0], *self.weight.shape, lora.rank
        low = self._project(graph, pool, lora, x)
        dlow = pool.take((rows, rank))
        scale = lora.scale
        assert lora.b.gradient is not None
        gemm(graph, dy, lora.b.weight, dlow, m=rows, n=rank, k=out, alpha=scale)
        gemm(
            graph,
            dy,
            low,
            lora.b.gradient,
            trans_a=True,
            m=out,
            n=rank,
            k=rows,
            alpha=scale,
            accumulate=True,
        )
        if lora.a_gradient is not None:
            gemm(
                graph,
                dlow,
                x,
                lora.a_gradient,
                trans_a=True,
                m=rank,
                n=inner,
                k=rows,
                accumulate=True,
            )
        if dx is not None:
            gemm(graph, dlow, lora.a, dx, m=rows, n=inner, k=rank, accumulate=True)
        pool.give_back(low)
        pool.give_back(dlow)

    def _project(self, graph: Graph, pool: MemoryPool, lora: Lora, x: Array) -> Array:
        """Record x A^T `[M, r]`; it is cheaper to compute twice than to keep."""
        low = pool.take((x.shape[0], lora.rank))
        gemm(graph, x, lora.a, low, trans_b=True, m=x.shape[0], n=lora.rank, k=x.shape[1])
        return low
