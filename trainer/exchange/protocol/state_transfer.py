"""Transfer weights and optimizer state to a joining worker."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from trainer.exchange.protocol.wire import CHUNK, Frame, MessageType
from trainer.optimizer.adamw import VECTORS, Snapshot, TrainState
from trainer.system.errors import ProtocolError


def make_state_frames(snapshot: Snapshot, generation: int, moments: bool) -> Iterator[Frame]:
    """Yield a state as frames, lazily; `block` numbers weights, first and second moment.

    Training continues during the transfer: the snapshot holds each vector until its last frame has
    been sent, which is when the next one is drawn.
    """
    sent = VECTORS if moments else VECTORS[:1]
    for vector in VECTORS[len(sent) :]:
        snapshot.release(vector)
    for index, array in enumerate(chain.from_iterable(map(snapshot.iter_chunks, sent))):
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


class _Digest:
    """The BLAKE3 of a state as it travels: weights, moments if they are sent, and the step.

    Both sides feed it frame by frame: hashing a state of 7 GB at once would silence either for
    seconds.
    """

    def __init__(self) -> None:
        self._hasher = blake3()

    def add_frame(self, frame: Frame) -> None:
        self._hasher.update(frame.payload)

    def finish_digest(self, step: int) -> str:
        return self._hasher.update(struct.pack("<Q", step)).hexdigest()


class StateDelivery:
    """The frames for a joiner: its state, then the averages and commits of the run meanwhile."""

    def __init__(self) -> None:
        self.digest = ""
        """The state's, once its last frame was drawn."""
        self.waiting = 0
        """Streams of frames that the link did not take whole yet."""

    def make_state_frames(
        self, snapshot: Snapshot, generation: int, moments: bool
    ) -> Iterator[Frame]:
        """Yield a state's frames; `digest` is set just before the last one is sent."""
        digest = _Digest()
        left = snapshot.weights.nbytes * (3 if moments else 1)
        for frame in make_state_frames(snapshot, generation, moments):
            digest.add_frame(frame)
            left -= len(frame.payload)
            if not left:
                self.digest = digest.finish_digest(snapshot.step)
            yield frame

    def count_stream(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        """Return the frames as a stream that counts as waiting until the last one was drawn."""
        self.waiting += 1
        return self._yield_frames(frames)

    def _yield_frames(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        yield from frames
        self.waiting -= 1


class StateAssembly:
    """A state being received, `size` fp32 elements an array.

    Args:
        shared: the sender's own state, in one process: nothing is copied, and it is returned.
    """

    def __init__(
        self, size: int, step: int, moments: bool, shared: TrainState | None = None
    ) -> None:
        self.digest = ""
        """The state's, once it is whole."""
        self._step = step
        self._shared = shared
        arrays = () if shared else (np.zeros(size, np.float32) for _ in VECTORS)
        self._arrays = tuple(arrays)
        self._bytes: list[NDArray[np.uint8]] = [array.view(np.uint8) for array in self._arrays]
        self._size = 4 * size
        self._due = 3 if moments else 1
        self._block: int = 0
        self._filled = 0
        self._digest = _Digest()

    def add_frame(self, frame: Frame) -> TrainState | None:
        """Add a frame and return the state when it is whole.

        Raises:
            ProtocolError: the frame does not continue the state.
        """
        end = frame.offset + len(frame.payload)
        in_turn = frame.block == self._block < self._due and frame.offset == self._filled
        if not in_turn or frame.step != self._step or end > self._size:
            raise ProtocolError(f"state {frame.block}: bytes {frame.offset}..{end} out of order")
        if not self._shared:
            self._bytes[frame.block][frame.offset : end] = np.frombuffer(frame.payload, np.uint8)
        self._digest.add_frame(frame)
        self._filled = end
        if end == self._size:
            self._block, self._filled = self._block + 1, 0
        if self._block < self._due:
            return None
        self.digest = self._digest.finish_digest(self._step)
        return self._shared or TrainState(*self._arrays, step=self._step)
