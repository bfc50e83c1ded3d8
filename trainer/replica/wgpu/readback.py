"""Copy gradients to the host, block by block, while later blocks are still computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import wgpu

from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.weights.slots import Slots


class Readback:
    """Host-visible memory for every block.

    Args:
        blocks: the gradients on the device, padded by `slots`.
    """

    def __init__(self, device: Device, slots: Slots, blocks: list[Array]) -> None:
        self._device = device
        self._slots = slots
        self._blocks = blocks
        usage = wgpu.BufferUsage.MAP_READ | wgpu.BufferUsage.COPY_DST
        self._staging = [device.buffer(block.nbytes, usage) for block in blocks]

    def encode(self, encoder: Any, index: int) -> None:
        """Encode the copy of a final block."""
        block, staging = self._blocks[index], self._staging[index]
        encoder.copy_buffer_to_buffer(block.buffer, block.offset, staging, 0, block.nbytes)

    def submit_all(self) -> None:
        """Copy every block now."""
        encoder = self._device.encoder()
        for index in range(len(self._blocks)):
            self.encode(encoder, index)
        self._device.submit(encoder)

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield index and gradient, fp32 `[block.size]`, in the layout's order of sending.

        Waits for each copy in turn; `encode` must have been submitted for all.
        """
        for index in self._slots.layout.send_order:
            staging = self._staging[index]
            with self._device.raise_device_errors():
                staging.map_sync(wgpu.MapMode.READ)
            try:
                size = self._blocks[index].nbytes
                mapped: Any = staging.read_mapped(0, size, copy=False)
                gradient = self._slots.unpad_block(index, np.frombuffer(mapped, np.float32))
            finally:
                staging.unmap()
            yield index, gradient
