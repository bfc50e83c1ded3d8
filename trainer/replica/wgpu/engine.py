"""Run shards on a device: one upload and one readback, gradients apart from both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import ALIGNMENT
from trainer.replica.wgpu.batch import PackedBatch
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layer_major import Group, Member, WaitingMemory, split_groups
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.layers.head import LossSums
from trainer.replica.wgpu.recordings import Recordings
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads

_WORDS = ALIGNMENT // 4  # from one result to the next: each is a kernel argument
_TAUGHT, _FLAG, _PREDICTIONS = _WORDS, 2 * _WORDS, 3 * _WORDS
_WITH_INPUTS = ("embed", "head", "embedding")
"""Parts that read the vector of their micro-batch."""
EncodeMore = Callable[[Any, str], None]


@dataclass(frozen=True)
class EngineResult:
    """The result of a shard's micro-batches."""

    loss: float
    """The cross-entropy, summed over targets; NaN if any intermediate value was not finite."""
    taught: float
    """The same against a teacher; 0 without one."""
    predictions: NDArray[np.uint32]
    """`[samples]` in the order of the micro-batches, of an evaluated classifier; else empty."""


class Engine:
    """Runs micro-batches of one model.

    Args:
        keep: hold activations for backward instead of computing them twice.
        uploads: writes the layers that are not resident; None: all are.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        *,
        keep: bool,
        uploads: LayerUploads | None = None,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._layer_uploads = uploads
        self._keep = keep
        self._sums = device.create_array((3, _WORDS), "u32")
        self._uploads = device.create_array((_WORDS,), "u32")
        self._results = device.create_array((_PREDICTIONS,), "u32")
        self._pool = MemoryPool(device)
        self._recordings = self._none_yet()
        self._waiting = WaitingMemory(MemoryPool(device)) if uploads else None

    def free_memory(self) -> None:
        """Free all memory but the weights', after it ran out."""
        if self._waiting is not None:
            self._waiting.release()
        self._pool.release()
        self._pool = MemoryPool(self._device)
        self._recordings = self._none_yet()

    def prepare_groups(
        self, micros: Sequence[PackedBatch], tokens: int, *, training: bool
    ) -> list[list[Member]]:
        """Make the recordings of micro-batches in groups of so many tokens; nothing runs yet.

        Groups have one micro-batch if all layers are resident.

        Raises:
            DeviceError: there is no memory for it.
        """
        embedding = self._layer_uploads.embedding if self._layer_uploads else None
        members: list[Member] = []
        start = first = 0
        for micro in micros:
            recording = self._recordings.get(micro.bucket, training=training)
            packed, words = (micro, None) if embedding is None else micro.list_tokens()
            members.append(Member(packed, recording, words, start, first))
            start += 4 * len(micro.vector)
            first += micro.bucket.samples
        groups = split_groups(members, tokens if self._waiting is not None else 0)
        if self._waiting is not None and groups:
            rows = max(sum(member.rows for member in group) for group in groups)
            self._waiting.reserve_rows(rows, members[0].recording)
        return groups

    def submit_parts(
        self, groups: Sequence[Group], encode_more: EncodeMore | None = None
    ) -> Iterator[str]:
        """Submit groups part by part, and yield each of the last group's parts when it is.

        Some systems consider a device hung that is busy for seconds with one submission.

        Args:
            encode_more: may encode after a part of the last micro-batch, in the same submission.
        """
        self._device.clear([self._sums])
        self._upload_vectors([member.micro for member in chain(*groups)])
        uploads = self._layer_uploads
        if uploads is not None:
            uploads.announce(
                member.list_segments(part)
                for group in groups
                for part in group[0].recording.parts
                for member in group
            )
        for group in groups:
            is_last = group is groups[-1]
            for part in group[0].recording.parts:
                row = 0
                for member in group:
                    more = encode_more if is_last and member is group[-1] else None
                    self._submit_part(member, part, row, more)
                    row += member.rows
                if is_last:
                    yield part

    def _submit_part(
        self, member: Member, part: str, row: int, encode_more: EncodeMore | None
    ) -> None:
        """Submit a part of a micro-batch, whose values wait in the group's rows from `row` on."""
        recording, names = member.recording, member.list_segments(part)
        uploads = self._layer_uploads
        if part == "embed" and member.words is not None:
            assert uploads is not None
            assert uploads.embedding is not None
            uploads.embedding.write(recording.table, member.words)
        for name in names:
            if uploads is not None:
                uploads.write_layer(name)
            encoder = self._device.create_encoder()
            if name == names[0]:
                if part in _WITH_INPUTS:
                    vector, start = recording.vector, member.vector_start
                    encoder.copy_buffer_to_buffer(
                        self._uploads.buffer, start, vector.buffer, vector.offset, vector.nbytes
                    )
                if self._waiting is not None:
                    self._waiting.encode_loads(encoder, recording, part, row)
            recording.graph.encode(encoder, *recording.graph.find_segment(name))
            if name == names[-1]:
                if self._waiting is not None:
                    self._waiting.encode_saves(encoder, recording, part, row)
                if encode_more is not None:
                    encode_more(encoder, part)
            self._device.submit(encoder)
        if part == "head" and recording.predictions is not None:
            offset = 4 * (_PREDICTIONS + member.first_sample)
            self._copy_region(recording.predictions, offset, 4 * member.micro.bucket.samples)

    def wait_for_result(self) -> EngineResult:
        """Wait for the started micro-batches and return their result."""
        self._copy_region(self._sums, 0, self._sums.nbytes)
        words = self._device.read(self._results)
        finite = words[_FLAG] == 0
        sums = words[: _TAUGHT + 1].view(np.float32)[[0, _TAUGHT]]
        loss, taught = (float(value) if finite else float("nan") for value in sums)
        return EngineResult(loss, taught, words[_PREDICTIONS:])

    def _none_yet(self) -> Recordings:
        loss = Array(self._sums.buffer, (1,))
        taught = Array(self._sums.buffer, (1,), offset=4 * _TAUGHT)
        flag = Array(self._sums.buffer, (1,), "u32", 4 * _FLAG)
        sums = LossSums(loss, taught, flag)
        waits = self._layer_uploads is not None
        return Recordings(self._decoder, self._pool, sums, keep=self._keep, waits=waits)

    def _upload_vectors(self, micros: Sequence[PackedBatch]) -> None:
        """Write all vectors in one upload."""
        vector = np.concatenate([np.empty(0, np.uint32), *(micro.vector for micro in micros)])
        samples = sum(micro.bucket.samples for micro in micros)
        self._uploads = self._at_least(self._uploads, len(vector))
        self._results = self._at_least(self._results, _PREDICTIONS + samples)
        if len(vector):
            self._device.write(self._uploads.slice_rows(0, len(vector)), vector)

    def _at_least(self, array: Array, words: int) -> Array:
        if array.size >= words:
            return array
        assert array.buffer is not None
        self._device.release(array.buffer)
        return self._device.create_array((2 * words,), "u32")

    def _copy_region(self, source: Array, place: int, count: int) -> None:
        encoder = self._device.create_encoder()
        encoder.copy_buffer_to_buffer(
            source.buffer, source.offset, self._results.buffer, place, count
        )
        self._device.submit(encoder)
