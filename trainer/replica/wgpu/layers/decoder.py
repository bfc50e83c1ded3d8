"""A decoder of the Llama kind, recorded for one shape of micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trainer.config.lora import LINEARS
from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, linear_path
from trainer.planning.stored_layers import split_head
from trainer.planning.vulkan import EMBEDDING, HEAD, matrix_kind, name_chunk
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu.batch import Bucket
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.distillation import TeacherPredictions
from trainer.replica.wgpu.kernels.elementwise import fill
from trainer.replica.wgpu.kernels.embedding import embed_tokens, embedding_gradient
from trainer.replica.wgpu.kernels.finite import mark_non_finite
from trainer.replica.wgpu.kernels.pool import gather_rows
from trainer.replica.wgpu.layers import decoder_layer
from trainer.replica.wgpu.layers.attention import Attention
from trainer.replica.wgpu.layers.decoder_layer import Activations, Layer, Norm, Shape
from trainer.replica.wgpu.layers.head import (
    Head,
    HeadRows,
    LossSums,
    Targets,
    split_matrix,
)
from trainer.replica.wgpu.layers.linear import Linear, Lora, Trainable

_PEFT = "base_model.model."


@dataclass(frozen=True)
class Tensors:
    """All tensors on the device, by the names of the layout and of the model directory."""

    frozen: Mapping[str, Array]
    weights: Mapping[str, Array]
    """The trainable ones."""
    gradients: Mapping[str, Array]
    """Empty for a model that only evaluates."""
    rope: tuple[Array, Array]

    def find_norm(self, name: str) -> Norm:
        """Return the norm of that name, frozen or trained."""
        if name in self.weights:
            return Norm(self.weights[name], self.gradients.get(name))
        return Norm(self.frozen[name])

    def find_matrix(self, name: str) -> tuple[Array, Array | None]:
        """Return a weight, and its gradient if it trains."""
        if name in self.weights:
            return self.weights[name], self.gradients.get(name)
        return self.frozen[name], None

    def find_chunks(self, name: str, shape: tuple[int, int]) -> list[HeadRows]:
        """Return a head's matrix of that name in chunks, which may be those of the device."""
        if name in self.weights or name in self.frozen:
            return split_matrix(*self.find_matrix(name))
        return [
            HeadRows(rows.start, self.frozen[name_chunk(number)])
            for number, rows in enumerate(split_head(*shape))
        ]

    def find_linear(self, stem: str, lora_scale: float) -> Linear:
        """Return a linear with its bias and adapter, if any."""
        weight, gradient = self.find_matrix(f"{stem}.weight")
        bias, bias_gradient = None, None
        if f"{stem}.bias" in self.weights or f"{stem}.bias" in self.frozen:
            bias, bias_gradient = self.find_matrix(f"{stem}.bias")
        return Linear(weight, gradient, bias, bias_gradient, self._find_lora(stem, lora_scale))

    def _find_lora(self, stem: str, scale: float) -> Lora | None:
        a, b = (f"{_PEFT}{stem}.lora_{side}.weight" for side in "AB")
        if b not in self.weights:
            return None
        return Lora(*self.find_matrix(a), Trainable(self.weights[b], self.gradients.get(b)), scale)


@dataclass(frozen=True)
class Part:
    """A part of a recording, such as the forward of a layer."""

    segments: list[str]
    taken: dict[str, Array] = field(default_factory=dict[str, Array])
    """Values that it has from parts before, by name."""
    left: dict[str, Array] = field(default_factory=dict[str, Array])
    """Values that it leaves for later parts."""


Parts = dict[str, Part]
"""By name and in order: `embed`, `forward.N`, `head`, and in training `backward.N`, `embedding`."""


class Decoder:
    """The model on a device; records forwards and backwards.

    Args:
        tree: the model's config.json.
    """

    def __init__(
        self,
        architecture: Architecture,
        tree: Mapping[str, Any],
        config: RunConfig,
        tensors: Tensors,
    ) -> None:
        self.architecture = architecture
        self._classify = config.task == "classify"
        self._temperature = config.distillation.temperature if config.distillation else 1.0
        self.eps = float(tree.get("rms_norm_eps", 1e-6))
        self.rope = tensors.rope
        self.layers = [
            _make_layer(
                tensors, number, config.lora.scale, rotates=number not in architecture.unrotated
            )
            for number in range(architecture.num_layers)
        ]
        self._embedding = self._embedding_gradient = None
        if EMBEDDING in tensors.weights or EMBEDDING in tensors.frozen:
            self._embedding, self._embedding_gradient = tensors.find_matrix(EMBEDDING)
        self._table_kind: Kind = matrix_kind(config)
        name = HEAD
        if self._classify:
            # An adapter's run names the head as PEFT does; only a full one has the plain name.
            name = next(n for n in ("score.weight", f"{_PEFT}score.weight") if n in tensors.weights)
        elif architecture.tied:
            name = EMBEDDING
        table = (architecture.vocab_size, architecture.hidden_size)
        self.head = Head(
            tensors.find_norm("model.norm.weight"),
            tensors.find_chunks(name, table),
            self.eps,
            streams=name_chunk(0) in tensors.frozen,
        )

    def take_table(self, pool: MemoryPool, rows: int) -> Array:
        """Return the embedding, or memory for the rows of so many tokens of it."""
        if self._embedding is not None:
            return self._embedding
        return pool.take((rows, self.architecture.hidden_size), self._table_kind, purpose="input")

    def give_table_back(self, pool: MemoryPool, table: Array) -> None:
        """Free what `take_table` took."""
        if self._embedding is None:
            pool.give_back(table)

    def record_training(
        self,
        graph: Graph,
        pool: MemoryPool,
        bucket: Bucket,
        vector: Array,
        table: Array,
        sums: LossSums,
        *,
        keep: bool,
        waits: bool,
    ) -> Parts:
        """Record a micro-batch, forward and backward; gradients are `+=`.

        Segments: `embed`, `forward.N`, `head.N` for each chunk of targets, `backward.N` and
        `embedding`; after a `head.N` those of a head that streams. Backward may begin after the
        chunks that have targets.

        Args:
            table: of `take_table`.
            keep: hold every layer's activations; else only its input, and compute the rest twice.
            waits: what a part leaves waits elsewhere, so the recording has memory for one layer.
        """
        shape = self._layer_shape(bucket)
        layers, size = len(self.layers), (bucket.rows, self.architecture.hidden_size)
        if waits:
            inputs = [pool.take(size, purpose="activations") for _ in range(2)]
        else:
            inputs = [pool.take(size, purpose="checkpoints") for _ in range(layers + 1)]
        stream = [inputs[number % len(inputs)] for number in range(layers + 1)]
        shared = Activations.take(pool, shape) if waits or not keep else None
        kept = [shared or Activations.take(pool, shape) for _ in self.layers]
        ids = bucket.slice_vector(vector, "ids")

        def name_kept(number: int) -> dict[str, Array]:
            arrays = kept[number].list_arrays() if keep else []
            return {f"kept.{number}.{place}": array for place, array in enumerate(arrays)}

        last = f"hidden.{layers}"  # later the gradient of these hidden states, and of those before
        parts = {"embed": Part(["embed"], left={"hidden.0": stream[0]})}
        graph.begin_segment("embed")
        embed_tokens(graph, table, ids, stream[0])
        for number, weights in enumerate(self.layers):
            name, x, y = f"forward.{number}", stream[number], stream[number + 1]
            graph.begin_segment(name)
            decoder_layer.forward(graph, pool, weights, shape, kept[number], x, y)
            left = {f"hidden.{number + 1}": y} | name_kept(number)
            parts[name] = Part([name], {f"hidden.{number}": x}, left)
        dx = pool.take(size, purpose="activations")
        for chunk in range(bucket.chunks):
            graph.begin_segment(f"head.{chunk}")
            if chunk == 0:
                fill(graph, dx, value=0.0)
            targets = self._chunk_targets(bucket, vector, chunk)
            self.head.loss(graph, pool, stream[-1], targets, sums, dx=dx)
        parts["head"] = _head_part(graph, {last: stream[-1]}, {last: dx})
        for number in reversed(range(len(self.layers))):
            name, taken = f"backward.{number}", {f"hidden.{number}": stream[number], last: dx}
            graph.begin_segment(name)
            parts[name] = Part([name], taken | name_kept(number), {last: dx})
            weights = self.layers[number]
            if not keep:
                decoder_layer.recompute(graph, pool, weights, shape, kept[number], stream[number])
            decoder_layer.backward(graph, pool, weights, shape, kept[number], stream[number], dx)
        parts["embedding"] = Part(["embedding"], {last: dx})
        graph.begin_segment("embedding")
        mark_non_finite(graph, dx, sums.flag)
        if self._embedding_gradient is not None:
            unique, starts, order = (
                bucket.slice_vector(vector, name) for name in ("unique", "starts", "order")
            )
            embedding_gradient(graph, dx, unique, starts, order, self._embedding_gradient)
        for array in (*inputs, dx):
            pool.give_back(array)
        for activations in [shared] if shared else kept:
            activations.give_back(pool)
        return parts

    def record_evaluation(
        self,
        graph: Graph,
        pool: MemoryPool,
        bucket: Bucket,
        vector: Array,
        table: Array,
        sums: LossSums,
        predictions: Array | None,
    ) -> Parts:
        """Record a micro-batch, forward alone.

        Segments: `embed`, `forward.N`, `head.N`. predictions u32 `[B]` for a classifier.
        """
        x, parts = self._record_layers(graph, pool, bucket, vector, table)
        for chunk in range(bucket.chunks):
            graph.begin_segment(f"head.{chunk}")
            targets = self._chunk_targets(bucket, vector, chunk)
            self.head.loss(graph, pool, x, targets, sums, predictions=predictions)
        parts["head"] = _head_part(graph, {"hidden.0": x}, {})
        pool.give_back(x)
        return parts

    def record_logits(
        self,
        graph: Graph,
        pool: MemoryPool,
        bucket: Bucket,
        vector: Array,
        table: Array,
        logits: Array,
    ) -> list[list[str]]:
        """Record the logits at the targets of a micro-batch, forward alone.

        Return the segments that run for each chunk of targets, which overwrites `logits` `[N, V]`.
        """
        x, _ = self._record_layers(graph, pool, bucket, vector, table)
        rows, count = bucket.slice_vector(vector, "rows"), logits.shape[0]
        ends: list[int] = [0]
        for number, first in enumerate(range(0, rows.size, count)):
            graph.begin_segment(f"head.{number}")
            chunk = rows.slice_rows(first, min(first + count, rows.size))
            picked = pool.take((chunk.size, x.shape[1]))
            gather_rows(graph, x, chunk, picked)
            self.head.logits(graph, pool, picked, logits.slice_rows(0, chunk.size))
            pool.give_back(picked)
            ends.append(len(graph.segments))
        pool.give_back(x)
        return [graph.segments[start:stop] for start, stop in pairwise(ends)]

    def _record_layers(
        self, graph: Graph, pool: MemoryPool, bucket: Bucket, vector: Array, table: Array
    ) -> tuple[Array, Parts]:
        """Record the last hidden states `[M, D]`, which are to be given back, in parts."""
        shape = self._layer_shape(bucket)
        size = (bucket.rows, self.architecture.hidden_size)
        x, y = (pool.take(size, purpose="activations") for _ in range(2))
        kept = Activations.take(pool, shape, evaluates=True)
        parts = {"embed": Part(["embed"], left={"hidden.0": x})}
        graph.begin_segment("embed")
        embed_tokens(graph, table, bucket.slice_vector(vector, "ids"), x)
        for number, weights in enumerate(self.layers):
            name = f"forward.{number}"
            graph.begin_segment(name)
            decoder_layer.forward(graph, pool, weights, shape, kept, x, y)
            parts[name] = Part([name], {"hidden.0": x}, {"hidden.0": y})
            x, y = y, x
        pool.give_back(y)
        kept.give_back(pool)
        return x, parts

    def _chunk_targets(self, bucket: Bucket, vector: Array, chunk: int) -> Targets:
        """Return the windows of one chunk of targets."""
        count, entries = bucket.chunk_rows, bucket.entries
        first, last = chunk * count, (chunk + 1) * count

        def slice_table(name: str, columns: int) -> Array:
            whole = bucket.slice_vector(vector, name).slice_rows(first * columns, last * columns)
            return whole.reshape(count, columns)

        rows = bucket.slice_vector(vector, "rows").slice_rows(first, last)
        teacher = None
        if entries:
            shares = bucket.slice_vector(vector, "shares")
            teacher = TeacherPredictions(
                slice_table("taught", entries),
                slice_table("weights", entries),
                shares,
                self._temperature,
            )
        return Targets(rows, slice_table("classes", 1), slice_table("counts", 1), teacher)

    def _layer_shape(self, bucket: Bucket) -> Shape:
        model = self.architecture
        attention = Attention(
            bucket.samples, model.num_heads, model.num_kv_heads, bucket.length, model.head_dim
        )
        return Shape(attention, model.hidden_size, model.intermediate_size, self.eps, self.rope)


def _head_part(graph: Graph, taken: dict[str, Array], left: dict[str, Array]) -> Part:
    return Part([name for name in graph.segments if name.startswith("head.")], taken, left)


def _make_layer(tensors: Tensors, number: int, lora_scale: float, *, rotates: bool) -> Layer:
    stem = f"model.layers.{number}"
    linears = {
        linear.removesuffix("_proj"): tensors.find_linear(
            f"{stem}.{linear_path(linear)}", lora_scale
        )
        for linear in LINEARS
    }

    def head_norm(name: str) -> Norm | None:
        full = f"{stem}.self_attn.{name}.weight"
        return (
            tensors.find_norm(full) if full in tensors.weights or full in tensors.frozen else None
        )

    return Layer(
        input_norm=tensors.find_norm(f"{stem}.input_layernorm.weight"),
        post_norm=tensors.find_norm(f"{stem}.post_attention_layernorm.weight"),
        q_norm=head_norm("q_norm"),
        k_norm=head_norm("k_norm"),
        rotates=rotates,
        **linears,
    )
