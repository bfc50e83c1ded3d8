"""One decoder layer of Qwen3, Qwen2 or Llama, forward and backward, as recorded kernels."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.elementwise import copy, swiglu, swiglu_backward
from trainer.replica.wgpu.kernels.heads import (
    head_norm_gradient,
    merge_heads,
    merge_heads_backward,
    split_heads,
    split_heads_backward,
)
from trainer.replica.wgpu.kernels.norm import rms_norm, rms_norm_backward, rms_norm_weight_gradient
from trainer.replica.wgpu.layers.attention import Attention
from trainer.replica.wgpu.layers.linear import Linear


@dataclass(frozen=True)
class Norm:
    """The weight of an RMSNorm, frozen or trained."""

    weight: Array
    gradient: Array | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer."""

    input_norm: Norm
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    post_norm: Norm
    gate: Linear
    up: Linear
    down: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    rotates: bool = True

    def choose_rope(self, tables: tuple[Array, Array]) -> tuple[Array, Array] | None:
        """Return the tables of the rotary embedding if this layer has one."""
        return tables if self.rotates else None


@dataclass(frozen=True)
class Shape:
    """Sizes and constants of model and micro-batch that a layer needs."""

    attention: Attention
    hidden: int
    inner: int
    eps: float
    rope: tuple[Array, Array]
    """Cosines and sines `[>= T, d / 2]`, of the layers that rotate."""

    @property
    def rows(self) -> int:
        """M = B * T."""
        return self.attention.batch * self.attention.length


@dataclass(frozen=True)
class Activations:
    """Values of forward that backward needs; M = B*T rows."""

    normed: Array
    """`[M, D]` input of q, k and v."""
    raw: tuple[Array, Array]
    """`[M, H*d]` queries and keys before their norm."""
    queries: Array
    keys: Array
    values: Array
    """Head-major, `[B, H, T, d]`."""
    attended: Array
    """`[M, Hq*d]` input of o."""
    middle: Array
    """`[M, D]` residual stream between attention and MLP."""
    normed_middle: Array
    gate: Array
    up: Array
    """`[M, F]`."""

    def list_arrays(self) -> list[Array]:
        """Return all of them, each once."""
        values: list[Array | tuple[Array, Array]] = [*vars(self).values()]
        parts = [part for each in values for part in (each if isinstance(each, tuple) else (each,))]
        return list({id(part): part for part in parts}.values())

    def give_back(self, pool: MemoryPool) -> None:
        """Give the memory back."""
        for array in self.list_arrays():
            pool.give_back(array)

    @classmethod
    def take(cls, pool: MemoryPool, shape: Shape, *, evaluates: bool = False) -> Activations:
        """Return memory for one layer's.

        Args:
            evaluates: no backward follows, so two arrays take the place of earlier ones.
        """
        attention, rows = shape.attention, shape.rows
        batch, length, head_dim = attention.batch, attention.length, attention.head_dim
        queries, keys = attention.num_heads * head_dim, attention.num_kv_heads * head_dim
        heads = (batch, attention.num_heads, length, head_dim)
        kv_heads = (batch, attention.num_kv_heads, length, head_dim)

        def take_array(*size: int) -> Array:
            return pool.take(size, purpose="activations")

        normed, raw_queries = take_array(rows, shape.hidden), take_array(rows, queries)
        return cls(
            normed=normed,
            raw=(raw_queries, take_array(rows, keys)),
            queries=take_array(*heads),
            keys=take_array(*kv_heads),
            values=take_array(*kv_heads),
            attended=raw_queries if evaluates else take_array(rows, queries),
            middle=take_array(rows, shape.hidden),
            normed_middle=normed if evaluates else take_array(rows, shape.hidden),
            gate=take_array(rows, shape.inner),
            up=take_array(rows, shape.inner),
        )


def forward(
    graph: Graph,
    pool: MemoryPool,
    layer: Layer,
    shape: Shape,
    kept: Activations,
    x: Array,
    y: Array,
) -> None:
    """Record y `[M, D]` = layer(x `[M, D]`); fills `kept`. x and y are two arrays."""
    recompute(graph, pool, layer, shape, kept, x)
    record_mlp_output(graph, pool, layer, kept.gate, kept.up, kept.middle, y)


def recompute(
    graph: Graph, pool: MemoryPool, layer: Layer, shape: Shape, kept: Activations, x: Array
) -> None:
    """Record all that backward needs, and no more: the layer without its last projection."""
    _record_attention(graph, pool, layer, shape, kept, x)
    rms_norm(graph, kept.middle, layer.post_norm.weight, kept.normed_middle, eps=shape.eps)
    layer.gate.forward(graph, pool, kept.normed_middle, kept.gate)
    layer.up.forward(graph, pool, kept.normed_middle, kept.up)


def record_mlp_output(
    graph: Graph, pool: MemoryPool, layer: Layer, gate: Array, up: Array, middle: Array, y: Array
) -> None:
    """Record y = middle + down(silu(gate) * up)."""
    product = pool.take(gate.shape)
    swiglu(graph, gate, up, product)
    copy(graph, middle, y)
    layer.down.forward(graph, pool, product, y, accumulate=True)
    pool.give_back(product)


def _record_attention(
    graph: Graph, pool: MemoryPool, layer: Layer, shape: Shape, kept: Activations, x: Array
) -> None:
    """Record the attention half; fills `kept` up to `middle`."""
    rms_norm(graph, x, layer.input_norm.weight, kept.normed, eps=shape.eps)
    for linear, norm, raw, heads in (
        (layer.q, layer.q_norm, kept.raw[0], kept.queries),
        (layer.k, layer.k_norm, kept.raw[1], kept.keys),
    ):
        linear.forward(graph, pool, kept.normed, raw)
        weight = norm.weight if norm is not None else None
        split_heads(
            graph, raw, heads, norm=weight, rope=layer.choose_rope(shape.rope), eps=shape.eps
        )
    values = pool.take(kept.raw[1].shape)
    layer.v.forward(graph, pool, kept.normed, values)
    split_heads(graph, values, kept.values)
    pool.give_back(values)

    merged = pool.take(kept.queries.shape)
    shape.attention.forward(graph, pool, kept.queries, kept.keys, kept.values, merged)
    merge_heads(graph, merged, kept.attended)
    pool.give_back(merged)
    copy(graph, x, kept.middle)
    layer.o.forward(graph, pool, kept.attended, kept.middle, accumulate=True)


def backward(
    graph: Graph,
    pool: MemoryPool,
    layer: Layer,
    shape: Shape,
    kept: Activations,
    x: Array,
    dx: Array,
) -> None:
    """Record dx `[M, D]`: from the gradient of the layer's output to that of its input x.

    Gradients of weights are `+=`. What forward kept is used up.
    """
    _transform_backward(graph, pool, layer, shape, kept, dx)
    _attend_backward(graph, pool, layer, shape, kept, x, dx)


def _transform_backward(
    graph: Graph, pool: MemoryPool, layer: Layer, shape: Shape, kept: Activations, dx: Array
) -> None:
    product, dproduct = pool.take(kept.gate.shape), pool.take(kept.gate.shape)
    swiglu(graph, kept.gate, kept.up, product)
    layer.down.backward(graph, pool, product, dx, dproduct)
    pool.give_back(product)
    swiglu_backward(graph, kept.gate, kept.up, dproduct)  # gate and up become their gradients
    pool.give_back(dproduct)
    dnormed = pool.take(dx.shape)
    layer.gate.backward(graph, pool, kept.normed_middle, kept.gate, dnormed)
    layer.up.backward(graph, pool, kept.normed_middle, kept.up, dnormed, accumulate=True)
    norm_backward(
        graph, pool, layer.post_norm, kept.middle, dnormed, dx, eps=shape.eps, accumulate=True
    )
    pool.give_back(dnormed)


def _attend_backward(
    graph: Graph,
    pool: MemoryPool,
    layer: Layer,
    shape: Shape,
    kept: Activations,
    x: Array,
    dx: Array,
) -> None:
    dattended = pool.take(kept.attended.shape)
    layer.o.backward(graph, pool, kept.attended, dx, dattended)
    dmerged = pool.take(kept.queries.shape)
    merge_heads_backward(graph, dattended, dmerged)
    dqueries, dkeys, dvalues = (
        pool.take(array.shape) for array in (kept.queries, kept.keys, kept.values)
    )
    shape.attention.backward(
        graph, pool, kept.queries, kept.keys, kept.values, dmerged, dqueries, dkeys, dvalues
    )
    pool.give_back(dmerged)

    dnormed = pool.take(dx.shape)
    # dattended has done its work and has the size of the queries.
    _head_backward(
        graph,
        pool,
        layer,
        layer.q,
        layer.q_norm,
        shape,
        kept.normed,
        kept.raw[0],
        dqueries,
        dattended,
        dnormed,
        accumulate=False,
    )
    draw = pool.take(kept.raw[1].shape)
    _head_backward(
        graph,
        pool,
        layer,
        layer.k,
        layer.k_norm,
        shape,
        kept.normed,
        kept.raw[1],
        dkeys,
        draw,
        dnormed,
        accumulate=True,
    )
    merge_heads(graph, dvalues, draw)
    layer.v.backward(graph, pool, kept.normed, draw, dnormed, accumulate=True)
    norm_backward(graph, pool, layer.input_norm, x, dnormed, dx, eps=shape.eps, accumulate=True)
    for array in (dattended, dqueries, dkeys, dvalues, dnormed, draw):
        pool.give_back(array)


def _head_backward(
    graph: Graph,
    pool: MemoryPool,
    layer: Layer,
    linear: Linear,
    norm: Norm | None,
    shape: Shape,
    normed: Array,
    raw: Array,
    dheads: Array,
    draw: Array,
    dnormed: Array,
    *,
    accumulate: bool,
) -> None:
    """Record the way back through rotary embedding, head norm and projection."""
    weight, rope = norm.weight if norm is not None else None, layer.choose_rope(shape.rope)
    split_heads_backward(graph, raw, dheads, draw, norm=weight, rope=rope, eps=shape.eps)
    if norm is not None and norm.gradient is not None:
        head_norm_gradient(graph, pool, raw, dheads, norm.gradient, rope=rope, eps=shape.eps)
    linear.backward(graph, pool, normed, draw, dnormed, accumulate=accumulate)


def norm_backward(
    graph: Graph,
    pool: MemoryPool,
    norm: Norm,
    x: Array,
    dy: Array,
    dx: Array,
    *,
    eps: float,
    accumulate: bool,
) -> None:
    """Record dx (+)= the gradient through a norm; that of a trained weight is `+=`."""
    rms_norm_backward(graph, x, norm.weight, dy, dx, eps=eps, accumulate=accumulate)
    if norm.gradient is not None:
        rms_norm_weight_gradient(graph, pool, x, dy, norm.gradient, eps=eps)
