"""Trainable tensors on the device: the layout's blocks with aligned tensors.

A kernel's argument begins at a multiple of 256 bytes, a tensor of the flat vector anywhere. So a
block is padded between its tensors, and is transferred as one range.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trainer.model.layout import Block, GradientLayout
from trainer.planning.vulkan_buffers import align_size
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.pool import MemoryPool


class Slots:
    """The padded form of a layout, for weights and for gradients alike."""

    def __init__(self, layout: GradientLayout) -> None:
        self.layout = layout
        self._starts = [_tensor_starts(block) for block in layout.blocks]

    def padded_size(self, index: int) -> int:
        """Return the elements of a padded block."""
        return self._starts[index][-1]

    def take_arrays(
        self, pool: MemoryPool, purpose: Literal["trainable", "gradients"]
    ) -> list[Array]:
        """Take one fp32 array `[padded_size]` for each block.

        Raises:
            OutOfMemoryError: a block does not fit, or exceeds the largest buffer.
        """
        return [pool.take((starts[-1],), purpose=purpose) for starts in self._starts]

    def tensors_by_name(self, blocks: list[Array]) -> dict[str, Array]:
        """Return every tensor by name, as a window of the result of `arrays`."""
        found: dict[str, Array] = {}
        for block, array, starts in zip(self.layout.blocks, blocks, self._starts, strict=True):
            for slot, start in zip(block.tensors, starts, strict=False):
                found[slot.name] = array.slice_rows(start, start + slot.size).reshape(*slot.shape)
        return found

    def pad_block(self, index: int, values: np.ndarray) -> np.ndarray:
        """Return a block `[block.size]` in its form on the device, with zeros between tensors."""
        block, starts = self.layout.blocks[index], self._starts[index]
        padded = np.zeros(starts[-1], np.float32)
        for slot, start in zip(block.tensors, starts, strict=False):
            begin = slot.start - block.start
            padded[start : start + slot.size] = values[begin : begin + slot.size]
        return padded

    def unpad_block(self, index: int, padded: np.ndarray) -> np.ndarray:
        """Return a block `[block.size]` from its form on the device."""
        block, starts = self.layout.blocks[index], self._starts[index]
        values = np.empty(block.size, np.float32)
        for slot, start in zip(block.tensors, starts, strict=False):
            begin = slot.start - block.start
            values[begin : begin + slot.size] = padded[start : start + slot.size]
        return values


def _tensor_starts(block: Block) -> list[int]:
    """Return each tensor's first element in the padded block, and the block's size."""
    starts = [0]
    for slot in block.tensors:
        starts.append(starts[-1] + align_size(4 * slot.size) // 4)
    return starts
