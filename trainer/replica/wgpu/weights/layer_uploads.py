"""Layers that are not resident, written to the device just before the segment that uses them.

Two layers of the device's memory are theirs by turns: a queue runs in order, so a layer is written
when all that used the one before it in its place has been computed. Chunks of a head that is not
resident have two more places, and are written as layers after the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain

import numpy as np

from trainer.model.safetensors_headers import TensorHeader
from trainer.planning.vulkan import EMBEDDING, SLOTS
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.weights.floats import convert_stored, to_bf16
from trainer.replica.weights.frozen_weights import FrozenWeights
from trainer.replica.weights.layer_feed import LayerFeed
from trainer.replica.weights.stored_file import StoredTable
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device

StoredTensors = dict[str, tuple[TensorHeader, Array]]
"""Where each tensor is in a file, and its memory on the device."""
_AS_STORED = {("F32", "f32"), ("BF16", "bf16"), ("U8", "nf4")}


class LayerUploads:
    """Writer of the layers of a frozen base that are not resident.

    Args:
        layers: their tensors; layers whose places in the order differ by two have the same memory.
        head: the chunks of a head, of which the same is true; none if it is resident.
        opened: keeps their files until this object is gone.

    Raises:
        InputError: a file cannot be opened.
    """

    def __init__(
        self,
        device: Device,
        layers: Mapping[int, StoredTensors],
        head: Sequence[StoredTensors],
        opened: ExitStack,
    ) -> None:
        self._device, self._opened = device, opened
        self._slots = {layer: place % SLOTS for place, layer in enumerate(sorted(layers))}
        self._first_chunk = max(layers) + 1
        chunks = dict(enumerate(head, self._first_chunk))
        self._slots |= {chunk: SLOTS + place % SLOTS for place, chunk in enumerate(chunks)}
        self._layers = layers = {**layers, **chunks}
        self._order = sorted(layers)
        self._present: list[int | None] = [None] * (2 * SLOTS)
        self._coming: deque[int] = deque()
        self._computed: Callable[[], None] | None = None
        self.feed = LayerFeed(
            FrozenWeights(
                {
                    layer: {name: header for name, (header, _) in tensors.items()}
                    for layer, tensors in layers.items()
                }
            )
        )
        """Reads the layers."""
        self.embedding: EmbeddingRows | None = None
        """Writes rows of the embedding; None: the device has all."""

    def announce(self, graphs: Iterable[Sequence[str]]) -> None:
        """Take the segments of the graphs that will be submitted, in their order."""
        layers = (self._find_layer(name) for segments in graphs for name in segments)
        self._coming = deque(layer for layer in layers if layer in self._slots)

    def write_layer(self, segment: str) -> None:
        """Write the layer of a segment before it is submitted, unless the device has it.

        Raises:
            InputError: the layer cannot be read.
            DeviceError: the device fails.
        """
        layer = self._find_layer(segment)
        if layer not in self._slots:
            return
        announced = self._coming.popleft()
        assert layer == announced, f"{segment}: layer {announced} was announced"
        slot = self._slots[layer]
        if self._present[slot] == layer:
            return
        self._present[slot] = None
        self.feed.hold(layer, self._find_following(layer))
        self._limit_staging()
        for name, (header, array) in self._layers[layer].items():
            raw = self.feed.tensor(layer, name)
            _write_bytes(self._device, array, _convert_bytes(raw, header.dtype, array.kind))
        self._present[slot] = layer

    def _find_layer(self, segment: str) -> int | None:
        """Return the layer of a segment, or of a head's its chunk; None for other segments."""
        part, _, number = segment.rpartition(".")
        if part in ("forward", "backward"):
            return int(number)
        return self._first_chunk + int(number) if part.endswith(("forward", "backward")) else None

    def _find_following(self, layer: int) -> int | None:
        """Return the layer that is read after this one; None: the device has all."""
        present = {layer, *self._present}
        # After what was announced a forward begins.
        return next((one for one in chain(self._coming, self._order) if one not in present), None)

    def _limit_staging(self) -> None:
        """Wait until all layers but the last have left the host's memory.

        The host would else be ahead of the device by as many layers as it can read.
        """
        computed, self._computed = self._computed, self._device.mark_submitted()
        if computed is not None:
            computed()


class EmbeddingRows:
    """Writer of an embedding's rows, of which a device has those of one micro-batch.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, device: Device, header: TensorHeader) -> None:
        self._device, self._table, self._dtype = (
            device,
            StoredTable(header, EMBEDDING),
            header.dtype,
        )

    def write(self, array: Array, tokens: np.ndarray) -> None:
        """Write the rows of these tokens `[n]` to the first of an array.

        Raises:
            InputError: they cannot be read.
            DeviceError: the device fails.
        """
        raw = self._table.read_rows(tokens).reshape(-1)
        first = replace(array, shape=(len(tokens), *array.shape[1:]))
        _write_bytes(self._device, first, _convert_bytes(raw, self._dtype, array.kind))


def _write_bytes(device: Device, array: Array, raw: np.ndarray) -> None:
    """Write bytes in the kind of an array, without its scales."""
    raw = np.pad(raw, (0, -raw.size % 4)) if raw.size % 4 else raw
    device.write(replace(array, shape=(array.nbytes // 4,), kind="u32", scales=None), raw)


def _convert_bytes(raw: np.ndarray, dtype: str, kind: Kind) -> np.ndarray:
    """Return stored bytes in the kind of an array."""
    if (dtype, kind) in _AS_STORED:
        return raw
    values = convert_stored(raw, dtype)
    return (to_bf16(values) if kind == "bf16" else values).view(np.uint8)
