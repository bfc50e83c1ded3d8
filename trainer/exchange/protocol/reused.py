"""Memory that is used again: pages that are fresh from the system cost more than a sum does."""

from __future__ import annotations

import weakref

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
        memory = self._spare.pop() if self._spare else np.empty(self._size, np.float32)
        # Views of an array over a buffer keep that array alive, and not only the memory behind it.
        array = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, self._keep, memory).atexit = False
        return array

    def _keep(self, memory: Float32) -> None:
        """Take memory back, in whichever thread dropped it."""
        self._spare[:] = [memory]
