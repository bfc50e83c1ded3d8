"""Weights and optimizer state on their way to a joining worker."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ProtocolError
from trainer.exchange.wire import CHUNK, Frame, MessageType
from trainer.optimizer import Snapshot, TrainState


def state_frames(snapshot: Snapshot, generation: int, moments: bool) -> Iterator[Frame]:
    """Yield a state as frames, lazily; `block` numbers weights, first and second moment.

    The snapshot lives as long as the iterator, so training goes on beside the transfer.
    """
    arrays = [snapshot.weights]
    if moments:
        arrays += [snapshot.first_moment, snapshot.second_moment]
    for index, array in enumerate(arrays):
        view = array.view(np.uint8).data
        for offset in range(0, len(view), CHUNK):
            yield Frame(
                MessageType.STATE,
                view[offset : offset + CHUNK],
                generation=generation,
                step=snapshot.step,
                block=index,
                offset=offset,
            )


class StateAssembly:
    """A state being received, `size` fp32 elements an array."""

    def __init__(self, size: int, step: int, moments: bool) -> None:
        self._step = step
        self._arrays = [np.zeros(size, np.float32) for _ in range(3)]
        self._bytes: list[NDArray[np.uint8]] = [array.view(np.uint8) for array in self._arrays]
        self._due = 3 if moments else 1
        self._block = 0
        self._filled = 0

    def add(self, frame: Frame) -> TrainState | None:
        """Take one frame in and return the state when it is whole.

        Raises:
            ProtocolError: the frame does not continue the state.
        """
        end = frame.offset + len(frame.payload)
        in_turn = frame.block == self._block < self._due and frame.offset == self._filled
        if not in_turn or frame.step != self._step or end > self._bytes[self._block].size:
            raise ProtocolError(f"state {frame.block}: bytes {frame.offset}..{end} out of turn")
        self._bytes[frame.block][frame.offset : end] = np.frombuffer(frame.payload, np.uint8)
        self._filled = end
        if end == self._bytes[frame.block].size:
            self._block, self._filled = self._block + 1, 0
        return TrainState(*self._arrays, step=self._step) if self._block == self._due else None
