"""A state that is written as a checkpoint while it is gathered from the ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from trainer.optimizer.adamw import Vector

_AHEAD = 1
"""Tensors that are gathered and not written yet."""
_LOOK = 0.5
"""Seconds between two looks at whether the writer has given up."""


class StreamedState:
    """A `SavedState` on rank 0: one thread puts tensors in, another writes them.

    What is put in after the writer has failed is dropped, so that the ranks gather to the end.
    """

    digest = None

    def __init__(self, step: int) -> None:
        self.step = step
        self._queue: queue.Queue[np.ndarray | OSError | None] = queue.Queue(_AHEAD)
        self._closed = threading.Event()

    def put(self, piece: np.ndarray | OSError | None) -> None:
        """Hand over the next tensor, fp32 `[n]`; None ends a vector."""
        while not self._closed.is_set():
            try:
                self._queue.put(piece, timeout=_LOOK)
                return
            except queue.Full:
                continue

    def give_up(self) -> None:
        """Let the writer fail: the rest does not come."""
        self.put(OSError("the other ranks' parts did not come"))

    def pieces(self, vector: Vector) -> Iterator[np.ndarray]:
        """Yield the tensors of the next vector."""
        del vector  # they come in the order in which they are written
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, OSError):
                raise piece
            yield piece

    def close(self) -> None:
        """Nothing more is read."""
        self._closed.set()
