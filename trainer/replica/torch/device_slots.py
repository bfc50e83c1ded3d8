"""Two layers on a CUDA device, copied there beside the computing."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.replica.weights.frozen_weights import FrozenWeights
from trainer.replica.weights.layer_feed import SLOTS, LayerFeed


class DeviceSlots:
    """A `LayerFeed` into page-locked memory, whose slots have a copy each on the device.

    Copies have a stream of their own. Computing waits for the copy of its layer, a copy until the
    layer that was in its slot has been computed, and the reading thread until the copy has left
    page-locked memory. The host, which gives out work ahead of the device, waits for reads alone.
    """

    def __init__(self, weights: FrozenWeights, device: torch.device) -> None:
        size = weights.span_bytes
        self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(SLOTS)]
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._layers: list[int | None] = [None] * SLOTS
        self._weights, self._device = weights, device
        self._stream = torch.cuda.Stream(device)
        # What had the slots' memory before may still be computed.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]
        self._computed = [torch.cuda.Event() for _ in range(SLOTS)]
        self._held: int | None = None
        memory = [host.numpy().data for host in self._hosts]
        self.feed = LayerFeed(weights, memory, self._wait_until_copied)
        """Reads the layers."""

    def get_tensor(self, layer: int, name: str, following: int | None) -> Tensor:
        """Return a weight's bytes on the device, u8, until another layer is asked for.

        Args:
            following: the layer after this one.
        """
        slot = self.feed.hold(layer, following)
        if self._held != slot or self._layers[slot] != layer:
            self._take(slot, layer)
        start, stop = self._weights.span(layer, name)
        return self._slots[slot][start:stop]

    def _take(self, slot: int, layer: int) -> None:
        """Give the layer that was held back to the copies, and copy this one if necessary."""
        computing = torch.cuda.current_stream(self._device)
        if self._held is not None:
            self._computed[self._held].record(computing)
        self._held = slot
        if self._layers[slot] == layer:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._computed[slot])
            self._slots[slot].copy_(self._hosts[slot], non_blocking=True)
            self._copied[slot].record(self._stream)
        computing.wait_event(self._copied[slot])
        self._layers[slot] = layer

    def _wait_until_copied(self, slot: int) -> None:
        self._copied[slot].synchronize()
