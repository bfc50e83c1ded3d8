"""Recordings of a model by shape of micro-batch, made at first use and run in small parts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.replica.wgpu.batch import Bucket, PackedBatch
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layers.decoder import Decoder
from trainer.replica.wgpu.layers.head import LossSums
from trainer.replica.wgpu.weights.layer_uploads import LayerUploads

_KEPT = 32
"""Cached recordings; their bind groups take host memory, their arrays share one pool."""


@dataclass(frozen=True)
class Recording:
    """One graph with its inputs and outputs."""

    graph: Graph
    vector: Array
    """u32 `[bucket.words]`"""
    predictions: Array | None
    """u32 `[B]`, of an evaluated classifier."""
    table: Array
    """The embedding, or `[M, D]` for the rows of its tokens."""


@dataclass(frozen=True)
class RecordingSettings:
    """The settings of a recording."""

    bucket: Bucket
    training: bool
    keep: bool


class Recordings:
    """All recordings of one model; they share a pool, since only one runs at a time."""

    def __init__(self, decoder: Decoder, pool: MemoryPool, sums: LossSums, *, keep: bool) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sums = sums
        self._keep = keep
        self._made: OrderedDict[RecordingSettings, Recording] = OrderedDict()

    def get(self, bucket: Bucket, *, training: bool) -> Recording:
        """Return the recording for a shape.

        Raises:
            DeviceError: there is no memory for it.
        """
        settings = RecordingSettings(bucket, training, self._keep)
        if settings not in self._made:
            self._made[settings] = make_recording(self._decoder, self._pool, self._sums, settings)
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        self._made.move_to_end(settings)
        return self._made[settings]


def make_recording(
    decoder: Decoder, pool: MemoryPool, sums: LossSums, settings: RecordingSettings
) -> Recording:
    """Make one recording; afterwards its memory is free for the next.

    Raises:
        DeviceError: there is no memory for it.
    """
    bucket, graph = settings.bucket, Graph(pool.device)
    vector = pool.take((bucket.words,), "u32", purpose="input")
    table = decoder.take_table(pool, bucket.rows)
    predictions = None
    if settings.training:
        decoder.record_training(graph, pool, bucket, vector, table, sums, settings.keep)
    else:
        if bucket.classify:
            predictions = pool.take((bucket.samples,), "u32", purpose="input")
        decoder.record_evaluation(graph, pool, bucket, vector, table, sums, predictions)
        if predictions is not None:
            pool.give_back(predictions)
    decoder.give_table_back(pool, table)
    pool.give_back(vector)
    return Recording(graph, vector, predictions, table)


Encoder = Any
"""A wgpu command encoder."""


def submit_recording(
    recording: Recording,
    packed: PackedBatch,
    before: Callable[[Encoder], None],
    after: Callable[[Encoder, str], None],
    uploads: LayerUploads | None = None,
) -> None:
    """Submit a recording layer by layer, without chunks of targets that are empty.

    Some systems consider a device hung that is busy for seconds with one submission.

    Args:
        before: may encode before the first dispatch.
        after: may encode after a segment, in the same submission; gets its name.
        uploads: writes the layers that are not resident; the recording was announced to it.
    """
    graph = recording.graph
    device = graph.device
    assert device is not None, "a plan cannot run"
    first = True
    for name in graph.segments:
        part, _, number = name.partition(".")
        if part == "head" and int(number) >= max(1, packed.chunks):
            continue
        if uploads is not None:
            uploads.write_layer(name)
        encoder = device.create_encoder()
        if first:
            before(encoder)
            first = False
        graph.encode(encoder, *graph.find_segment(name))
        after(encoder, name)
        device.submit(encoder)
