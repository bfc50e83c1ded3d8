"""Text generation on a GPU with Vulkan, with the keys and values of all tokens cached.

A call uses two recordings: one takes the prompts in chunks, one takes a token of each sample. Each
token needs one upload of a few words and one readback of logits `[B, V]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.layout import GradientLayout
from trainer.planning.vulkan_buffers import ALIGNMENT, PROMPT_CHUNKS, count_slots
from trainer.replica.continuation import Continuation, Until
from trainer.replica.sampling import Logits, Sampling
from trainer.replica.wgpu.generation.kv_cache import Cache, StepInputs, record_decoding
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import (
    USABLE,
    MemoryBudget,
    MemoryPool,
    measure_available_memory,
)
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.loaded_model import choose_layers, load_model, plan_decoder
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads
from trainer.system.errors import InputError

_WORDS = ALIGNMENT // 4


@dataclass(frozen=True)
class StepShape:
    """The shape of recordings."""

    batch: int
    chunk: int
    """Tokens of each prompt that are taken together."""
    slots: int
    """Cached tokens of each sample."""


@dataclass(frozen=True)
class _Recording:
    """The recording for T tokens of each sample."""

    graph: Graph
    vector: Array
    """u32: ids `[B * T]`, starts `[B]` and last rows `[B]`, each padded to an aligned size."""
    table: Array
    """The embedding, or `[B * T, D]` for the rows of the ids."""


@dataclass(frozen=True)
class _RecordedStep:
    shape: StepShape
    cache: Cache
    logits: Array
    """f32 `[B, V]`"""
    prefill: _Recording
    single: _Recording


def load_generator(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    weights: NDArray[np.float32] | None,
    device: Device,
    *,
    longest: int,
    max_new_tokens: int,
    batch: int = 8,
) -> WgpuGenerator:
    """Return a generator for prompts of up to `longest` tokens.

    Layers that do not fit beside `batch` prompts are read at each use.

    Args:
        weights: fp32 `[layout.size]`; None: those of `model_dir`, a full model.

    Raises:
        InputError: the model cannot be read, or one prompt does not fit.
        DeviceError: the device fails.
    """
    slots = count_slots(longest, max_new_tokens)
    data = config.data.model_copy(update={"max_seq_len": slots})
    config = config.model_copy(update={"data": data})
    model, limit = read_architecture(model_dir), device.binding_limit
    wanted = _choose_shape(batch, longest, slots)
    shapes = [each for each in _iterate_smaller(wanted) if 4 * _widest_array(model, each) <= limit]
    if not shapes:
        raise _refuse_tokens(device, slots, _explain_binding(limit))
    plan = partial(_plan_step, model_dir, config, layout, limit)
    resident = choose_layers(
        model_dir,
        config.model.resident,
        device,
        # All layers stay if one prompt fits beside them.
        lambda some: plan(shapes[-1 if some is None else 0], some),
        lambda some: plan(shapes[-1], some),
    )
    loaded = load_model(model_dir, config, layout, device, evaluates=True, resident=resident)
    if weights is not None:
        loaded.write(device, weights)
    return WgpuGenerator(device, loaded.decoder, loaded.uploads, batch=batch)


class WgpuGenerator:
    """A Generator of `trainer.evaluate.generation` on one device.

    Args:
        decoder: a language model whose weights are written.
        uploads: writes the layers that are not resident; None: all are.
        batch: the most samples that are continued together.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        uploads: LayerUploads | None = None,
        *,
        batch: int = 8,
    ) -> None:
        self.device = f"wgpu:{device.adapter.index}"
        self._device = device
        self._decoder = decoder
        self._uploads = uploads
        self._batch = batch
        self._pool = MemoryPool(device)
        self._made: tuple[StepShape, _RecordedStep] | None = None  # the requested, the fitting one

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop: frozenset[int] = frozenset(),
        until: Until | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt; see `Generator.generate`.

        The decoder must be loaded for `count_slots` positions at least.
        """
        # 1. Record both graphs, unless the last call had the same shape.
        recorded = self._find_recordings(prompts, max_new_tokens)
        batch = recorded.shape.batch
        # 2. Sort the prompts: those of similar length end in the same chunk.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        made: dict[int, list[int]] = {}
        for first in range(0, len(order), batch):
            group = order[first : first + batch]
            asked = [prompts[index] for index in group]
            run = _Run(self._device, recorded, asked, self._uploads)
            continued = Continuation(group, max_new_tokens, sampling, stop, until)
            # 3. Take the prompts of a group into the cache, in chunks.
            logits, place = run.prefill(), 0
            # 4. Choose a token for each, and take it in for the next logits, until all have ended.
            while (tokens := continued.choose_tokens(logits[: len(group)])) is not None:
                logits = run.next_logits(tokens, place)
                place += 1
            made |= continued.made
        # 5. Back in the order of the prompts.
        return [made[index] for index in range(len(prompts))]

    def release(self) -> None:
        """Free what the last call recorded, with its keys and values."""
        self._made = None
        self._pool.release()

    def _find_recordings(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> _RecordedStep:
        """Return recordings for these prompts, the last call's if they are the same."""
        longest = max(len(prompt) for prompt in prompts)
        slots = count_slots(longest, max_new_tokens)
        assert slots <= self._decoder.rope[0].shape[0], "the decoder has no such positions"
        wanted = _choose_shape(min(self._batch, len(prompts)), longest, slots)
        if self._made is None or self._made[0] != wanted:
            self.release()
            self._made = wanted, self._record_largest(wanted)
        return self._made[1]

    def _record_largest(self, wanted: StepShape) -> _RecordedStep:
        """Return recordings of the largest shape that fits.

        Raises:
            InputError: not even one sample fits.
        """
        problem = ""
        for shape in _iterate_smaller(wanted):
            problem = self._shape_problem(shape)
            if problem:
                continue
            try:
                return _record_step(self._pool, self._decoder, shape, self._device.binding_limit)
            except OutOfMemoryError as error:
                problem = str(error)
                self._pool.release()
        raise _refuse_tokens(self._device, wanted.slots, problem)

    def _shape_problem(self, shape: StepShape) -> str:
        """Return why a shape cannot be recorded; empty if no reason is known."""
        limit = self._device.binding_limit
        if 4 * _widest_array(self._decoder.architecture, shape) > limit:
            return _explain_binding(limit)
        plan = MemoryPool(None)
        _record_step(plan, self._decoder, shape, limit)
        budget, there = plan.report_budget(), measure_available_memory(self._device.adapter)
        if there is not None and budget.total > USABLE * there:
            return f"that needs {budget}, {there / 2**30:.1f} GiB are free"
        return ""


class _Run:
    """A batch of samples in progress; rows without a sample continue a token 0."""

    def __init__(
        self,
        device: Device,
        recorded: _RecordedStep,
        prompts: Sequence[Sequence[int]],
        uploads: LayerUploads | None,
    ) -> None:
        self._device = device
        self._recorded = recorded
        self._uploads = uploads
        self._lengths = np.ones(recorded.shape.batch, np.int64)
        self._lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
        chunks = -(-self._lengths.max() // recorded.shape.chunk)
        self._ids = np.zeros((len(self._lengths), chunks * recorded.shape.chunk), np.uint32)
        for row, prompt in zip(self._ids, prompts, strict=False):
            row[: len(prompt)] = prompt

    def prefill(self) -> Logits:
        """Take the prompts into the cache; return the logits `[B, V]` after each."""
        recorded, chunk = self._recorded, self._recorded.shape.chunk
        # A slot after a sample has no weight in its attention, but NaN times 0 would be NaN.
        self._device.clear(recorded.cache.arrays)
        logits = np.zeros(recorded.logits.shape, np.float32)
        last = self._lengths - 1
        for start in range(0, self._ids.shape[1], chunk):
            ids = self._ids[:, start : start + chunk]
            starts = np.full(len(last), start)
            self._start_recording(recorded.prefill, ids, starts, last % chunk)
            ending = last // chunk == start // chunk
            if ending.any():
                logits[ending] = self._device.read(recorded.logits)[ending]
        return logits

    def next_logits(self, tokens: NDArray[np.int64], place: int) -> Logits:
        """Take new token `place` of each sample; return the logits `[B, V]` after it."""
        ids = np.zeros((len(self._lengths), 1), np.uint32)
        ids[: len(tokens), 0] = tokens
        first = np.zeros(len(ids), np.int64)
        self._start_recording(self._recorded.single, ids, self._lengths + place, first)
        return self._device.read(self._recorded.logits)

    def _start_recording(
        self,
        part: _Recording,
        ids: NDArray[np.uint32],
        starts: NDArray[np.int64],
        last: NDArray[np.int64],
    ) -> None:
        """Run a recording; `last` `[B]` are columns of ids."""
        if self._uploads is not None and self._uploads.embedding is not None:
            tokens, places = np.unique(ids, return_inverse=True)
            self._uploads.embedding.write(part.table, tokens)
            ids = places.reshape(ids.shape).astype(np.uint32)
        rows = np.arange(len(ids)) * ids.shape[1] + last
        padded = (_pad_words(words.ravel()) for words in (ids, starts, rows))
        self._device.write(part.vector, np.concatenate(list(padded)).astype(np.uint32))
        if self._uploads is not None:
            self._uploads.announce([part.graph.segments])
        elif ids.shape[1] == 1:
            part.graph.run()
            return
        # Some systems consider a device hung that is busy for seconds with one submission.
        for name in part.graph.segments:
            if self._uploads is not None:
                self._uploads.write_layer(name)
            part.graph.run(*part.graph.find_segment(name))


def _plan_step(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    limit: int,
    shape: StepShape,
    resident: int | None,
) -> MemoryBudget:
    """Return the memory of a model with what continues prompts."""
    pool = MemoryPool(None)
    decoder = plan_decoder(model_dir, config, layout, pool, resident)
    _record_step(pool, decoder, shape, limit)
    return pool.report_budget()


def _explain_binding(limit: int) -> str:
    return f"an array exceeds the {limit >> 20} MiB that a kernel's argument may span"


def _refuse_tokens(device: Device, slots: int, problem: str) -> InputError:
    return InputError(
        f"{device.adapter.name}: {slots} tokens of one sample do not fit: {problem}; shorten the"
        " prompts or ask for fewer new tokens"
    )


def _choose_shape(batch: int, longest: int, slots: int) -> StepShape:
    """Return the shape for prompts of up to `longest` tokens, without regard to memory."""
    chunk = min((chunk for chunk in PROMPT_CHUNKS if chunk >= longest), default=PROMPT_CHUNKS[0])
    return StepShape(batch, chunk, slots)


def _iterate_smaller(wanted: StepShape) -> Iterator[StepShape]:
    """Yield a shape and smaller and smaller ones; fewer samples at last."""
    batch = wanted.batch
    while batch:
        for chunk in PROMPT_CHUNKS:
            if chunk <= wanted.chunk:
                yield StepShape(batch, chunk, wanted.slots)
        batch //= 2


def _widest_array(model: Architecture, shape: StepShape) -> int:
    """Return the elements of the largest array that is one kernel argument."""
    heads = model.num_heads * max(model.head_dim, shape.slots)
    rows = shape.chunk * max(heads, model.intermediate_size, model.hidden_size)
    cached = model.num_kv_heads * shape.slots * model.head_dim
    return shape.batch * max(rows, cached, model.vocab_size)


def _record_step(pool: MemoryPool, decoder: Decoder, shape: StepShape, limit: int) -> _RecordedStep:
    """Record prompts and single tokens on the pool's device, or plan them without one."""
    model = decoder.architecture
    cache = Cache.take(pool, model, shape.batch, shape.slots)
    logits = pool.take((shape.batch, model.vocab_size), purpose="logits")

    def record_part(length: int) -> _Recording:
        graph = Graph(pool.device, limit)
        sizes = (shape.batch * length, shape.batch, shape.batch)
        ends = np.cumsum([-(-size // _WORDS) * _WORDS for size in sizes]).tolist()
        vector = pool.take((ends[-1],), "u32", purpose="input")
        ids, starts, last = (
            Array(vector.buffer, (size,), "u32", vector.offset + 4 * begin)
            for size, begin in zip(sizes, (0, *ends), strict=False)
        )
        inputs = StepInputs(ids, starts, last, decoder.take_table(pool, shape.batch * length))
        record_decoding(graph, pool, decoder, cache, inputs, logits)
        return _Recording(graph, vector, inputs.table)

    return _RecordedStep(shape, cache, logits, record_part(shape.chunk), record_part(1))


def _pad_words(words: NDArray[Any]) -> NDArray[Any]:
    return np.pad(words, (0, -len(words) % _WORDS))
