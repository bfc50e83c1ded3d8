"""Reused memory: new pages from the system cost more time than a sum."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


class ReusedArray:
    """Gives out fp32 arrays `[n]`, one after another in the same memory if the last one is gone.

    Gone is an array to which nothing refers any more, no view of it and no frame that is queued.
    While one is in use the next has memory of its own, so at most one gradient is kept for later.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[Float32] = []

    def take(self) -> Float32:
        """Return an array; its values are arbitrary."""
        memory = self._spare.pop() if self._spare else self._fresh()
        # Views of an array over a buffer keep that array alive, and not only the memory behind it.
        array = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, self._keep, memory).atexit = False
        return array

    def _fresh(self) -> Float32:
        """Return new memory outside of malloc's heap, where what others free leaves holes."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return np.frombuffer(mmap.mmap(-1, 4 * self._size, flags), np.float32)

    def _keep(self, memory: Float32) -> None:
        """Take memory back, in whichever thread dropped it."""
        self._spare[:] = [memory]


class BlockVector:
    """A vector of which each block is an array of its own, so that each is gone by itself.

    A block that a slow reader has yet to be sent would keep a whole vector otherwise.
    """

    def __init__(self, starts: Sequence[int], blocks: Sequence[Float32]) -> None:
        """`starts` of the blocks, which lie one behind another."""
        self._starts, self._blocks = starts, blocks
        self.size = starts[-1] + blocks[-1].size

    def __getitem__(self, span: slice) -> Float32:
        """Return a range, a view if it lies within one block."""
        start, stop, _ = span.indices(self.size)
        parts: list[Float32] = []
        for block in range(bisect_right(self._starts, start) - 1, len(self._blocks)):
            begin = self._starts[block]
            if begin >= stop:
                break
            parts.append(self._blocks[block][max(start - begin, 0) : stop - begin])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
