"""Checkpoints of one process's form: rank 0 gathers the parts of all ranks and writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.exchange.protocol.actions import Save
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.run.distributed.optimizer import ParallelAdamW
from trainer.run.distributed.streamed import StreamedState

if TYPE_CHECKING:
    from trainer.tracking.run_recorder import RunRecorder


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

    def stream(self, step: int, scores: dict[str, Any] | None) -> None:
        """Write the same while it is gathered: rank 0 holds a few tensors at a time."""
        stream = None
        if self.recorder is not None:
            stream = StreamedState(step)
            self.recorder.save(Save(stream, self.generation, scores))
        try:
            for parts in self.optimizer.vectors().values():
                for slot, piece in zip(
                    self.replica.layout.tensors(), self.replica.gathered(parts), strict=True
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
