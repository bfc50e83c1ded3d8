"""Recordings of generation steps: prompts by chunks of their tokens, then single tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from trainer.model.architecture import Architecture
from trainer.planning.vulkan_buffers import PROMPT_CHUNKS, padded_words
from trainer.replica.wgpu.generation.kv_cache import Cache, StepInputs, record_decoding
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layer_major import WaitingMemory
from trainer.replica.wgpu.layers.decoder import Decoder, Part
from trainer.replica.wgpu.recordings import Recording


@dataclass(frozen=True)
class StepShape:
    """The shape of recordings."""

    batch: int
    chunk: int
    """Tokens of each prompt that are taken together."""
    slots: int
    """Cached tokens of each sample."""
    waiting: int = 0
    """Tokens of each prompt that a layer takes before the next one, if they are several chunks."""

    @property
    def group(self) -> int:
        """Chunks of a prompt that a layer takes before the next one."""
        return max(1, self.waiting // self.chunk)


@dataclass(frozen=True)
class RecordedStep:
    """Recordings of one shape; their vectors have ids `[B * T]` and starts `[B]`, each padded."""

    shape: StepShape
    cache: Cache
    hidden: Array
    """f32 `[B, D]`, of which single tokens have their logits; prompts leave theirs here."""
    logits: Array
    """f32 `[B, V]`"""
    prefill: Recording
    single: Recording
    """Has part `head`."""
    waiting: WaitingMemory
    """Hidden states of the chunks of a group; empty if it has one."""


def choose_shape(batch: int, longest: int, slots: int, *, waits: bool) -> StepShape:
    """Return the shape for prompts of up to `longest` tokens, without regard to memory.

    Args:
        waits: a layer takes all chunks before the next one.
    """
    chunk = min((chunk for chunk in PROMPT_CHUNKS if chunk >= longest), default=PROMPT_CHUNKS[0])
    return StepShape(batch, chunk, slots, -(-longest // chunk) * chunk if waits else 0)


def iterate_smaller(wanted: StepShape) -> Iterator[StepShape]:
    """Yield a shape and smaller ones: shorter chunks, fewer that wait, fewer samples at last."""
    most, batch = wanted.waiting // wanted.chunk, wanted.batch
    chunks = [chunk for chunk in PROMPT_CHUNKS if chunk <= wanted.chunk]
    while batch:
        for halvings, chunk in product(range(most.bit_length() + 1), chunks):
            yield StepShape(batch, chunk, wanted.slots, (most >> halvings) * wanted.chunk)
        batch //= 2


def widest_array(model: Architecture, shape: StepShape) -> int:
    """Return the elements of the largest array that is one kernel argument."""
    heads = model.num_heads * max(model.head_dim, shape.slots)
    rows = shape.chunk * max(heads, model.intermediate_size, model.hidden_size)
    cached = model.num_kv_heads * shape.slots * model.head_dim
    return shape.batch * max(rows, cached, model.vocab_size)


def record_step(pool: MemoryPool, decoder: Decoder, shape: StepShape, limit: int) -> RecordedStep:
    """Record prompts and single tokens on the pool's device, or plan them without one."""
    model = decoder.architecture
    cache = Cache.take(pool, model, shape.batch, shape.slots)
    hidden = pool.take((shape.batch, model.hidden_size), purpose="activations")
    logits = pool.take((shape.batch, model.vocab_size), purpose="logits")

    def record_tokens(length: int) -> Recording:
        graph, is_single = Graph(pool.device, limit), length == 1
        rows = shape.batch * length
        first = padded_words(rows)
        vector = pool.take((first + padded_words(shape.batch),), "u32", purpose="input")
        ids = Array(vector.buffer, (rows,), "u32", vector.offset)
        starts = Array(vector.buffer, (shape.batch,), "u32", vector.offset + 4 * first)
        inputs = StepInputs(ids, starts, decoder.take_table(pool, rows))
        out = hidden if is_single else None
        parts = record_decoding(graph, pool, decoder, cache, inputs, out)
        if is_single:
            before = len(graph.segments)
            graph.begin_segment("head")
            decoder.head.logits(graph, pool, hidden, logits)
            parts["head"] = Part(graph.segments[before:])
        return Recording(graph, vector, None, inputs.table, parts, rows)

    prefill, waiting = record_tokens(shape.chunk), WaitingMemory(pool)
    if shape.group > 1:
        waiting.reserve_rows(shape.group * prefill.rows, prefill)
    single = record_tokens(1)
    return RecordedStep(shape, cache, hidden, logits, prefill, single, waiting)
