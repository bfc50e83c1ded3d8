"""Recordings of a model by shape of micro-batch, made at first use."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from trainer.replica.wgpu.batch import Bucket
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import MemoryPool
from trainer.replica.wgpu.layers.decoder import Decoder, Parts
from trainer.replica.wgpu.layers.head import LossSums

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
    parts: Parts
    rows: int
    """M, the tokens of a micro-batch."""


@dataclass(frozen=True)
class RecordingSettings:
    """The settings of a recording."""

    bucket: Bucket
    training: bool
    keep: bool
    waits: bool
    """Values that a part leaves for later ones wait in memory of their own."""


class Recordings:
    """All recordings of one model; they share a pool, since only one runs at a time."""

    def __init__(
        self, decoder: Decoder, pool: MemoryPool, sums: LossSums, *, keep: bool, waits: bool
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sums = sums
        self._keep = keep
        self._waits = waits
        self._made: OrderedDict[RecordingSettings, Recording] = OrderedDict()

    def get(self, bucket: Bucket, *, training: bool) -> Recording:
        """Return the recording for a shape.

        Raises:
            DeviceError: there is no memory for it.
        """
        settings = RecordingSettings(bucket, training, self._keep, self._waits)
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
        keep, waits = settings.keep, settings.waits
        parts = decoder.record_training(
            graph, pool, bucket, vector, table, sums, keep=keep, waits=waits
        )
    else:
        if bucket.classify:
            predictions = pool.take((bucket.samples,), "u32", purpose="input")
        parts = decoder.record_evaluation(graph, pool, bucket, vector, table, sums, predictions)
        if predictions is not None:
            pool.give_back(predictions)
    decoder.give_table_back(pool, table)
    pool.give_back(vector)
    return Recording(graph, vector, predictions, table, parts, bucket.rows)
