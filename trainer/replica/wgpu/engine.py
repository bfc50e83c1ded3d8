"""Run shards on a device: one upload and one readback, gradients apart from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import ALIGNMENT
from trainer.replica.wgpu.batch import PackedBatch
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.kernels.embedding import Words
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.layers.head import LossSums
from trainer.replica.wgpu.recordings import Recording, Recordings, submit_recording
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads

_WORDS = ALIGNMENT // 4  # from one result to the next: each is a kernel argument
_TAUGHT, _FLAG, _PREDICTIONS = _WORDS, 2 * _WORDS, 3 * _WORDS
AfterSegment = Callable[[Any, str], None]


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

    def free_memory(self) -> None:
        """Free all memory but the weights', after it ran out."""
        self._pool.release()
        self._pool = MemoryPool(self._device)
        self._recordings = self._none_yet()

    def prepare_recordings(
        self, micros: Sequence[PackedBatch], *, training: bool
    ) -> list[Recording]:
        """Make the recordings of these micro-batches; nothing runs yet.

        Raises:
            DeviceError: there is no memory for it.
        """
        return [self._recordings.get(micro.bucket, training=training) for micro in micros]

    def start_microbatches(
        self,
        micros: Sequence[PackedBatch],
        recordings: Sequence[Recording],
        after_segment: AfterSegment | None = None,
    ) -> None:
        """Start all micro-batches; `after_segment` is called for those of the last one."""
        self._device.clear([self._sums])
        tokens: Sequence[Words | None] = [None] * len(micros)
        embedding = self._layer_uploads.embedding if self._layer_uploads else None
        if embedding is not None:
            listed = [micro.list_tokens() for micro in micros]
            micros, tokens = [micro for micro, _ in listed], [each for _, each in listed]
        starts = self._upload_vectors(micros)
        if self._layer_uploads is not None:
            self._layer_uploads.announce(recording.graph.segments for recording in recordings)
        first = 0
        for micro, recording, start, words in zip(micros, recordings, starts, tokens, strict=True):
            if embedding is not None and words is not None:
                embedding.write(recording.table, words)
            last = recording is recordings[-1] and micro is micros[-1]
            count = micro.bucket.samples
            place = 4 * (_PREDICTIONS + first)

            def copy_vector(
                encoder: Any, start: int = start, recording: Recording = recording
            ) -> None:
                vector = recording.vector
                encoder.copy_buffer_to_buffer(
                    self._uploads.buffer, start, vector.buffer, vector.offset, vector.nbytes
                )

            submit_recording(
                recording,
                micro,
                copy_vector,
                after_segment if last and after_segment else _do_nothing,
                self._layer_uploads,
            )
            if recording.predictions is not None:
                self._copy_region(recording.predictions, place, 4 * count)
            first += count

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
        return Recordings(self._decoder, self._pool, sums, keep=self._keep)

    def _upload_vectors(self, micros: Sequence[PackedBatch]) -> list[int]:
        """Write all vectors in one upload; return their offsets in bytes."""
        vector = np.concatenate([np.empty(0, np.uint32), *(micro.vector for micro in micros)])
        samples = sum(micro.bucket.samples for micro in micros)
        self._uploads = self._at_least(self._uploads, len(vector))
        self._results = self._at_least(self._results, _PREDICTIONS + samples)
        if len(vector):
            self._device.write(self._uploads.slice_rows(0, len(vector)), vector)
        sizes = [4 * len(micro.vector) for micro in micros]
        return [sum(sizes[:number]) for number in range(len(sizes))]

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


def _do_nothing(_encoder: Any, _segment: str) -> None:
    pass
