"""Checkpoints of one process's form: rank 0 gathers the parts of all ranks and writes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.exchange.protocol.actions import Save
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.run.distributed.optimizer import ParallelAdamW

if TYPE_CHECKING:
    from trainer.optimizer.adamw import Vector
    from trainer.tracking.run_recorder import RunRecorder

_AHEAD = 1
"""Tensors that are gathered and not written yet."""
_LOOK = 0.5
"""Seconds between two looks at whether the writer has given up."""


@dataclass(frozen=True)
class GatheredCheckpoints:
    """`Checkpoints` that a run of any strategy, and one without, resume from.

    To save beside training, rank 0 needs three times the trainable weights in its host's memory.
    """

    replica: ParallelReplica
    optimizer: ParallelAdamW
    recorder: RunRecorder | None
    """On rank 0."""
    generation: int

    def save(self, step: int, scores: dict[str, Any] | None) -> None:
        """Gather the state on all ranks and write it on rank 0, in the background."""
        snapshot = self.optimizer.snapshot(step, self.replica)
        if self.recorder is not None:
            assert snapshot is not None
            self.recorder.save(Save(snapshot, self.generation, scores))

    def stream_state(self, step: int, scores: dict[str, Any] | None) -> None:
        """Write the same while it is gathered: rank 0 holds a few tensors at a time."""
        stream = None
        if self.recorder is not None:
            stream = StreamedState(step)
            self.recorder.save(Save(stream, self.generation, scores))
        try:
            for parts in self.optimizer.local_vectors().values():
                for slot, piece in zip(
                    self.replica.layout.iter_tensors(),
                    self.replica.iterate_parameters(parts),
                    strict=True,
                ):
                    if stream is not None:
                        stream.put(np.zeros(slot.size, np.float32) if piece is None else piece)
                if stream is not None:
                    stream.put(None)
        except BaseException:
            if stream is not None:
                stream.give_up()
            raise

    def finish(self, step: int) -> None:
        """Nothing is left to do: the recorder waits for what it writes."""

    def give_up(self, error: BaseException) -> None:
        """Nothing waits for another rank."""


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
        self.put(OSError("the other ranks' parts did not arrive"))

    def iter_chunks(self, vector: Vector) -> Iterator[np.ndarray]:
        """Yield the tensors of the next vector."""
        del vector  # they come in the order in which they are written
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, OSError):
                raise piece
            yield piece

    def close(self) -> None:
        """Nothing more is read."""
        self._closed.set()
