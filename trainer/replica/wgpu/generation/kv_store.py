"""Keys and values of some layers of another engine's model, and the attention of new tokens there.

A step of a layer takes one upload (queries, keys, values and places of the new tokens) and one
readback (the heads' outputs). All rows of a step are one token: prompts are attended to where the
model is, and only their keys and values come here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.planning.vulkan_buffers import Kind, KVShape, count_slots, padded_words
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.errors import OutOfMemoryError
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.pool import USABLE, MemoryPool, measure_available_memory
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.heads import split_heads
from trainer.replica.wgpu.kernels.softmax import cached_softmax


class _StepUpload:
    """The upload of a step: queries, keys, values and places of a token a sample."""

    def __init__(self, pool: MemoryPool, batch: int, shape: KVShape) -> None:
        rows = batch, shape.num_kv_heads * shape.head_dim
        parts: dict[str, tuple[int, ...]] = {
            "queries": (batch * shape.num_heads, shape.head_dim),
            "keys": rows,
            "values": rows,
            "places": (batch,),
        }
        ends = np.cumsum([padded_words(math.prod(part)) for part in parts.values()]).tolist()
        self.vector = pool.take((ends[-1],), "u32", purpose="input")
        self.words = np.zeros(ends[-1], np.uint32)
        self.arrays: dict[str, Array] = {}
        self._views: list[NDArray[Any]] = []
        for (name, part), begin in zip(parts.items(), (0, *ends), strict=False):
            kind: Kind = "u32" if name == "places" else "f32"
            offset = self.vector.offset + 4 * begin
            self.arrays[name] = Array(self.vector.buffer, part, kind, offset)
            view = self.words[begin : begin + math.prod(part)]
            self._views.append(view if kind == "u32" else view.view(np.float32))

    def upload_parts(self, *given: NDArray[Any]) -> None:
        """Take the parts, in order."""
        for view, part in zip(self._views, given, strict=True):
            view[:] = part.ravel()


@dataclass(frozen=True)
class _CacheMemory:
    """Memory for a number of samples and slots."""

    batch: int
    slots: int
    kept: dict[int, tuple[Array, Array]]
    """Keys and values of each layer, `[B, Hkv, slots, d]`."""
    step: _StepUpload
    scores: Array
    out: Array
    """`[B * Hq, d]`"""
    graphs: dict[tuple[int, int], Graph] = field(default_factory=dict[tuple[int, int], Graph])
    """By layer and width."""


class KVStore:
    """Keeps keys and values of a batch of samples that begin at slot 0, and attends to them.

    Args:
        device: where they are kept.
        layers: the layers' numbers in their model.
    """

    def __init__(self, device: Device, shape: KVShape, layers: Iterable[int]) -> None:
        self.layers = frozenset(layers)
        self._device, self._shape = device, shape
        self._pool = MemoryPool(device)
        self._room: _CacheMemory | None = None

    def begin(self, batch: int, slots: int) -> None:
        """Make room for `slots` tokens of each of `batch` samples, in place of those before.

        Raises:
            OutOfMemoryError: they do not fit.
        """
        slots = count_slots(slots, 0)
        room = self._room
        if room is not None and room.batch == batch and room.slots >= slots:
            return  # what is left there is finite, and no softmax gives it a weight
        self._room = None
        self._pool.release()
        shape = self._shape
        cached = (batch, shape.num_kv_heads, slots, shape.head_dim)
        widest = max(shape.num_kv_heads * shape.head_dim, shape.num_heads)
        if 4 * batch * slots * widest > (limit := self._device.binding_limit):
            raise OutOfMemoryError(
                f"{self._device.adapter.name}: {slots} tokens of {batch} samples exceed the"
                f" {limit >> 20} MiB that a kernel's argument may span"
            )
        take, heads = self._pool.take, batch * shape.num_heads
        self._room = _CacheMemory(
            batch,
            slots,
            {layer: (take(cached), take(cached)) for layer in sorted(self.layers)},
            _StepUpload(self._pool, batch, shape),
            take((heads, slots)),
            take((heads, shape.head_dim)),
        )

    def fill(self, layer: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Keep a layer's keys and values of prompts, `[B, Hkv, T, d]` each, from slot 0 on."""
        room = self._room
        assert room is not None, "there is no room yet"
        pitch = 4 * room.slots * self._shape.head_dim
        for array, given in zip(room.kept[layer], (keys, values), strict=True):
            for row, tokens in enumerate(given.reshape(-1, *given.shape[2:])):
                offset = array.offset + row * pitch
                self._device.write(replace(array, shape=tokens.shape, offset=offset), tokens)
        # The queue keeps copies of what it writes until something is submitted.
        self._device.submit(self._device.create_encoder())

    def attend(
        self,
        layer: int,
        queries: NDArray[np.float32],
        keys: NDArray[np.float32],
        values: NDArray[np.float32],
        places: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """See `replica.torch.cache.LayerStore`."""
        room = self._room
        assert room is not None, "there is no room yet"
        width = count_slots(int(places.max()) + 1, 0)  # slots far behind cost nothing
        if (layer, width) not in room.graphs:
            room.graphs[layer, width] = self._record_attention(room, layer, width)
        room.step.upload_parts(queries, keys, values, places)
        self._device.write(room.step.vector, room.step.words)
        room.graphs[layer, width].run()
        return self._device.read(room.out)

    def _record_attention(self, room: _CacheMemory, layer: int, width: int) -> Graph:
        graph, shape, step = Graph(self._device), self._shape, room.step.arrays
        for name, kept in zip(("keys", "values"), room.kept[layer], strict=True):
            split_heads(graph, step[name], kept, starts=step["places"], cached=True)
        keys, values = room.kept[layer]
        matrices, head_dim = room.batch * shape.num_kv_heads, shape.head_dim
        group = shape.num_heads // shape.num_kv_heads
        scores = replace(room.scores, shape=(matrices, group, width))
        sizes = group * head_dim, room.slots * head_dim, group * width
        gemm(
            graph,
            step["queries"],
            keys,
            scores,
            trans_b=True,
            batch=matrices,
            m=group,
            n=width,
            k=head_dim,
            strides=sizes,
        )
        scale = 1 / math.sqrt(head_dim)
        cached_softmax(graph, step["places"], scores, length=1, scale=scale)
        gemm(
            graph,
            scores,
            values,
            room.out,
            batch=matrices,
            m=group,
            n=head_dim,
            k=width,
            strides=(sizes[2], sizes[1], sizes[0]),
        )
        return graph


def count_fitting_layers(device: Device, shape: KVShape, batch: int, slots: int) -> int | None:
    """Return of how many layers keys and values fit; None if the device does not report it."""
    there = measure_available_memory(device.adapter)
    if there is None:
        return None
    scores = 4 * batch * shape.num_heads * count_slots(slots, 0)
    return max(0, int(USABLE * there) - scores) // shape.cache_bytes(batch, slots)
