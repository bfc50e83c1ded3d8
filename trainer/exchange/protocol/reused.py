"""Reused memory: new pages from the system cost more time than a sum."""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


class ReusedArray:
    """Gives out fp32 arrays `[n]`, one after another in the same memory if the last one is gone.

    An array is free when nothing refers to it, no view of it and no frame that is queued.
    While one is in use the next has memory of its own, so at most one gradient is kept for later.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._spare: list[Float32] = []

    def take_array(self) -> Float32:
        """Return an array; its values are arbitrary."""
        memory = self._spare.pop() if self._spare else self._allocate()
        # Views of an array over a buffer keep that array alive, and not only the memory behind it.
        array = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, self._recycle, memory).atexit = False
        return array

    def _allocate(self) -> Float32:
        """Return new memory outside of malloc's heap, where what others free leaves holes."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return np.frombuffer(mmap.mmap(-1, 4 * self._size, flags), np.float32)

    def _recycle(self, memory: Float32) -> None:
        """Take memory back, in whichever thread dropped it."""
        self._spare[:] = [memory]


class BlockVector:
    """A vector of which each block is an array of its own, so that each is gone by itself.

    A block that a slow reader has yet to be sent would keep a whole vector otherwise.
    """

    def __init__(self, starts: Sequence[int], size: int, block: Callable[[int], Float32]) -> None:
        """`block` returns a block, valid until the next one is asked for."""
        self._starts, self._block = starts, block
        self.size = size
        self._latest = (-1, np.empty(0, np.float32))

    def __getitem__(self, span: slice) -> Float32:
        """Return a range, valid until the next one; a view if it lies within one block."""
        start, stop, _ = span.indices(self.size)
        first = bisect_right(self._starts, start) - 1
        last = bisect_left(self._starts, stop) - 1
        if first == last:
            begin = self._starts[first]
            return self._load_block(first)[start - begin : stop - begin]
        found = np.empty(stop - start, np.float32)
        for block in range(first, last + 1):
            begin = self._starts[block]
            part = self._load_block(block)[max(start - begin, 0) : stop - begin]
            at = max(begin, start) - start
            found[at : at + part.size] = part
        return found

    def _load_block(self, block: int) -> Float32:
        if self._latest[0] != block:
            self._latest = (block, self._block(block))
        return self._latest[1]
