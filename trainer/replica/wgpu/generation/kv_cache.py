"""The layers of a generation step: a few tokens after those whose keys and values are cached."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.model.architecture import Architecture
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.elementwise import copy
from trainer.replica.wgpu.kernels.embedding import embed_tokens
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.heads import merge_heads, split_heads
from trainer.replica.wgpu.kernels.norm import rms_norm
from trainer.replica.wgpu.kernels.softmax import cached_softmax
from trainer.replica.wgpu.layers.attention import Attention
from trainer.replica.wgpu.layers.decoder import Decoder, Part, Parts
from trainer.replica.wgpu.layers.decoder_layer import Layer, record_mlp_output


@dataclass(frozen=True)
class Cache:
    """Keys and values of every layer, `[B, Hkv, slots, d]` each; a token's slot is its position."""

    keys: list[Array]
    values: list[Array]

    @classmethod
    def take(cls, pool: MemoryPool, model: Architecture, batch: int, slots: int) -> Cache:
        """Return memory for `slots` tokens of each of `batch` samples."""
        shape = (batch, model.num_kv_heads, slots, model.head_dim)

        def take_layers() -> list[Array]:
            return [pool.take(shape, purpose="activations") for _ in range(model.num_layers)]

        return cls(take_layers(), take_layers())

    @property
    def arrays(self) -> list[Array]:
        """All of them."""
        return [*self.keys, *self.values]


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a recording, which change from run to run; all u32."""

    ids: Array
    """`[B * T]`, padded on the right."""
    starts: Array
    """`[B]`, the position of each sample's first token in this step."""
    table: Array
    """The embedding, or the rows of ids; not u32."""


def record_decoding(
    graph: Graph,
    pool: MemoryPool,
    decoder: Decoder,
    cache: Cache,
    inputs: StepInputs,
    out: Array | None = None,
) -> Parts:
    """Record T more tokens of each sample up to their last hidden states `[B * T, D]`.

    Padding writes into the cache after the sample's end and is overwritten later; the cache must
    have slots for it. Segments, each a part: `embed`, `forward.N`.

    Args:
        out: gets the last hidden states; None: they are valid until the next run.
    """
    batch, slots = cache.keys[0].shape[0], cache.keys[0].shape[2]
    model = decoder.architecture
    length = inputs.ids.size // batch
    attention = Attention(batch, model.num_heads, model.num_kv_heads, length, model.head_dim)
    size = (batch * length, model.hidden_size)
    x, y = pool.take(size), pool.take(size)
    parts = {"embed": Part(["embed"], left={"hidden": x})}
    graph.begin_segment("embed")
    embed_tokens(graph, inputs.table, inputs.ids, x)
    step = _Step(graph, pool, decoder, attention, slots, inputs.starts)
    for number, layer in enumerate(decoder.layers):
        name, is_last = f"forward.{number}", number == model.num_layers - 1
        target = out if out is not None and is_last else y
        graph.begin_segment(name)
        step.record_layer(layer, cache.keys[number], cache.values[number], x, target)
        parts[name] = Part([name], {"hidden": x}, {"hidden": target})
        x, y = y, x
    for array in (x, y):
        pool.give_back(array)
    return parts


@dataclass(frozen=True)
class _Step:
    graph: Graph
    pool: MemoryPool
    decoder: Decoder
    shape: Attention
    slots: int
    starts: Array

    def record_layer(self, layer: Layer, keys: Array, values: Array, x: Array, y: Array) -> None:
        """Record y = layer(x) after the cached tokens, and add these to the cache."""
        graph, pool, eps = self.graph, self.pool, self.decoder.eps
        rows, inner = x.shape[0], self.decoder.architecture.intermediate_size
        normed, middle = pool.take(x.shape), pool.take(x.shape)
        rms_norm(graph, x, layer.input_norm.weight, normed, eps=eps)
        attended = self._record_attention(layer, normed, keys, values)
        copy(graph, x, middle)
        layer.o.forward(graph, pool, attended, middle, accumulate=True)
        rms_norm(graph, middle, layer.post_norm.weight, normed, eps=eps)
        gate, up = pool.take((rows, inner)), pool.take((rows, inner))
        layer.gate.forward(graph, pool, normed, gate)
        layer.up.forward(graph, pool, normed, up)
        record_mlp_output(graph, pool, layer, gate, up, middle, y)
        for array in (normed, middle, attended, gate, up):
            pool.give_back(array)

    def _record_attention(self, layer: Layer, normed: Array, keys: Array, values: Array) -> Array:
        """Record the heads' outputs `[M, Hq * d]`."""
        graph, pool, shape = self.graph, self.pool, self.shape
        rope, starts, eps = layer.choose_rope(self.decoder.rope), self.starts, self.decoder.eps
        rows, head_dim = normed.shape[0], shape.head_dim
        raw = pool.take((rows, shape.num_heads * head_dim))
        queries = pool.take((shape.batch, shape.num_heads, shape.length, head_dim))
        weights = [norm.weight if norm else None for norm in (layer.q_norm, layer.k_norm)]
        layer.q.forward(graph, pool, normed, raw)
        split_heads(graph, raw, queries, norm=weights[0], rope=rope, eps=eps, starts=starts)
        few = pool.take((rows, shape.num_kv_heads * head_dim))
        layer.k.forward(graph, pool, normed, few)
        split_heads(
            graph, few, keys, norm=weights[1], rope=rope, eps=eps, starts=starts, cached=True
        )
        layer.v.forward(graph, pool, normed, few)
        split_heads(graph, few, values, starts=starts, cached=True)

        scores = pool.take((shape.batch * shape.num_kv_heads, shape.group_rows, self.slots))
        merged = pool.take(queries.shape)
        sizes = (shape.group_rows * head_dim, self.slots * head_dim, shape.group_rows * self.slots)
        gemm(
            graph,
            queries,
            keys,
            scores,
            trans_b=True,
            batch=scores.shape[0],
            m=shape.group_rows,
            n=self.slots,
            k=head_dim,
            strides=sizes,
        )
        cached_softmax(graph, starts, scores, length=shape.length, scale=shape.scale)
        gemm(
            graph,
            scores,
            values,
            merged,
            batch=scores.shape[0],
            m=shape.group_rows,
            n=head_dim,
            k=self.slots,
            strides=(sizes[2], sizes[1], sizes[0]),
        )
        attended = raw  # no longer needed, and of the right size
        merge_heads(graph, merged, attended)
        for array in (queries, few, scores, merged):
            pool.give_back(array)
        return attended
