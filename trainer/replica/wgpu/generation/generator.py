"""Text generation on a GPU with Vulkan, with the keys and values of all tokens cached.

A call uses two recordings: one takes the prompts in chunks, one takes a token of each sample. Each
token needs one upload of a few words and one readback of logits `[B, V]`. Where layers are read at
each use, a layer takes all chunks of the prompts before the next one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.run import RunConfig
from trainer.model.architecture import read_architecture
from trainer.model.layout import GradientLayout
from trainer.planning.vulkan_buffers import ALIGNMENT, count_slots
from trainer.replica.continuation import Continuation, Until
from trainer.replica.sampling import Logits, Sampling
from trainer.replica.wgpu.generation.recorded_step import (
    RecordedStep,
    StepShape,
    choose_shape,
    iterate_smaller,
    record_step,
    widest_array,
)
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError
from trainer.replica.wgpu.gpu.pool import (
    USABLE,
    MemoryBudget,
    MemoryPool,
    measure_available_memory,
)
from trainer.replica.wgpu.layer_major import encode_copy
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.loaded_model import choose_layers, load_model, plan_decoder
from trainer.replica.wgpu.recordings import Recording
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads
from trainer.system.errors import InputError

_WORDS = ALIGNMENT // 4


@dataclass(frozen=True)
class _Chunk:
    """Tokens of each sample that are taken together."""

    vector: NDArray[np.uint32]
    tokens: NDArray[np.uint32] | None
    """Whose rows of the embedding the device needs; None: it has all."""
    ends: Sequence[tuple[int, int]] = ()
    """Rows of last tokens of prompts, with their samples."""


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
    wanted = choose_shape(batch, longest, slots, waits=True)
    shapes = [each for each in iterate_smaller(wanted) if 4 * widest_array(model, each) <= limit]
    if not shapes:
        raise _refuse_tokens(device, slots, _explain_binding(limit))

    def plan(group: int, resident: int | None) -> MemoryBudget:
        shape = replace(shapes[0], waiting=group * shapes[0].chunk)
        # All layers stay if one prompt fits beside them.
        shape = shapes[-1] if resident is None else shape
        return _plan_step(model_dir, config, layout, limit, shape, resident)

    resident = choose_layers(
        model_dir,
        config.model.resident,
        device,
        plan,
        lambda some: _plan_step(model_dir, config, layout, limit, shapes[-1], some),
        most=shapes[0].group,
        others=max_new_tokens,
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
        self._made: tuple[StepShape, RecordedStep] | None = None  # the requested, the fitting one

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
    ) -> RecordedStep:
        """Return recordings for these prompts, the last call's if they are the same."""
        longest = max(len(prompt) for prompt in prompts)
        slots = count_slots(longest, max_new_tokens)
        assert slots <= self._decoder.rope[0].shape[0], "the decoder has no such positions"
        batch, waits = min(self._batch, len(prompts)), self._uploads is not None
        wanted = choose_shape(batch, longest, slots, waits=waits)
        if self._made is None or self._made[0] != wanted:
            self.release()
            self._made = wanted, self._record_largest(wanted)
        return self._made[1]

    def _record_largest(self, wanted: StepShape) -> RecordedStep:
        """Return recordings of the largest shape that fits.

        Raises:
            InputError: not even one sample fits.
        """
        problem = ""
        for shape in iterate_smaller(wanted):
            problem = self._shape_problem(shape)
            if problem:
                continue
            try:
                return record_step(self._pool, self._decoder, shape, self._device.binding_limit)
            except OutOfMemoryError as error:
                problem = str(error)
                self._pool.release()
        raise _refuse_tokens(self._device, wanted.slots, problem)

    def _shape_problem(self, shape: StepShape) -> str:
        """Return why a shape cannot be recorded; empty if no reason is known."""
        limit = self._device.binding_limit
        if 4 * widest_array(self._decoder.architecture, shape) > limit:
            return _explain_binding(limit)
        plan = MemoryPool(None)
        record_step(plan, self._decoder, shape, limit)
        budget, there = plan.report_budget(), measure_available_memory(self._device.adapter)
        if there is not None and budget.total > USABLE * there:
            return f"that needs {budget}, {there / 2**30:.1f} GiB are free"
        return ""


class _Run:
    """A batch of samples in progress; rows without a sample continue a token 0."""

    def __init__(
        self,
        device: Device,
        recorded: RecordedStep,
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
        recorded, length = self._recorded, self._recorded.shape.chunk
        # A slot after a sample has no weight in its attention, but NaN times 0 would be NaN.
        self._device.clear(recorded.cache.arrays)
        last = self._lengths - 1
        chunks: list[_Chunk] = []
        for start in range(0, self._ids.shape[1], length):
            ending = np.flatnonzero(last // length == start // length).tolist()
            ends = [(sample * length + int(last[sample]) % length, sample) for sample in ending]
            ids, starts = self._ids[:, start : start + length], np.full(len(last), start)
            chunks.append(replace(self._pack_chunk(ids, starts), ends=ends))
        each = recorded.shape.group
        groups = [chunks[first : first + each] for first in range(0, len(chunks), each)]
        parts, head = recorded.prefill.parts, recorded.single.parts["head"]
        if self._uploads is not None:
            turns = [part.segments for group in groups for part in parts.values() for _ in group]
            self._uploads.announce([*turns, head.segments])
        for group in groups:
            self._submit_parts(recorded.prefill, list(parts), group)
        self._submit_parts(recorded.single, ["head"], chunks[-1:])
        return self._device.read(recorded.logits)

    def next_logits(self, tokens: NDArray[np.int64], place: int) -> Logits:
        """Take new token `place` of each sample; return the logits `[B, V]` after it."""
        recorded = self._recorded
        ids = np.zeros((len(self._lengths), 1), np.uint32)
        ids[: len(tokens), 0] = tokens
        chunk, parts = self._pack_chunk(ids, self._lengths + place), list(recorded.single.parts)
        if self._uploads is None:
            self._device.write(recorded.single.vector, chunk.vector)
            recorded.single.graph.run()
        else:
            self._uploads.announce([recorded.single.graph.segments])
            self._submit_parts(recorded.single, parts, [chunk])
        return self._device.read(recorded.logits)

    def _pack_chunk(self, ids: NDArray[np.uint32], starts: NDArray[np.int64]) -> _Chunk:
        """Return ids `[B, T]` with the places `[B]` of the first ones."""
        tokens = None
        if self._uploads is not None and self._uploads.embedding is not None:
            tokens, places = np.unique(ids, return_inverse=True)
            ids = places.reshape(ids.shape).astype(np.uint32)
        padded = [_pad_words(words.ravel()) for words in (ids, starts)]
        return _Chunk(np.concatenate(padded).astype(np.uint32), tokens)

    def _submit_parts(
        self, recording: Recording, parts: Sequence[str], group: Sequence[_Chunk]
    ) -> None:
        """Run each part for all chunks in their order before the next part.

        Some systems consider a device hung that is busy for seconds with one submission.
        """
        recorded, uploads, waits = self._recorded, self._uploads, len(group) > 1
        last = list(recorded.prefill.parts)[-1]
        for part in parts:
            for number, chunk in enumerate(group):
                if part == "embed" and chunk.tokens is not None:
                    assert uploads is not None
                    assert uploads.embedding is not None
                    uploads.embedding.write(recording.table, chunk.tokens)
                if part == "embed" or waits:
                    self._device.write(recording.vector, chunk.vector)
                row = number * recording.rows
                for segment in recording.parts[part].segments:
                    if uploads is not None:
                        uploads.write_layer(segment)
                    encoder = self._device.create_encoder()
                    if waits:
                        recorded.waiting.encode_loads(encoder, recording, part, row)
                    recording.graph.encode(encoder, *recording.graph.find_segment(segment))
                    if waits:
                        recorded.waiting.encode_saves(encoder, recording, part, row)
                    for ended, sample in chunk.ends if part == last else ():
                        row_hidden = _find_row(recording.parts[part].left["hidden"], ended)
                        encode_copy(encoder, row_hidden, _find_row(recorded.hidden, sample))
                    self._device.submit(encoder)


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
    record_step(pool, decoder, shape, limit)
    return pool.report_budget()


def _explain_binding(limit: int) -> str:
    return f"an array exceeds the {limit >> 20} MiB that a kernel's argument may span"


def _refuse_tokens(device: Device, slots: int, problem: str) -> InputError:
    return InputError(
        f"{device.adapter.name}: {slots} tokens of one sample do not fit: {problem}; shorten the"
        " prompts or ask for fewer new tokens"
    )


def _pad_words(words: NDArray[Any]) -> NDArray[Any]:
    return np.pad(words, (0, -len(words) % _WORDS))


def _find_row(matrix: Array, row: int) -> Array:
    """Return a row of an f32 matrix, to copy: its bytes may be unaligned."""
    shape = (1, matrix.shape[1])
    return Array(matrix.buffer, shape, offset=matrix.offset + 4 * row * matrix.shape[1])
