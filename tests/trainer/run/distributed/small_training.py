"""A run of a few steps on ranks, with sharded checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainer.replica.torch.parallel.one_process import parallel_replica, samples
from trainer.checkpoint.reader import RunProgress
from trainer.config.optimizer import OptimizerConfig
from trainer.replica.torch.adamw import FusedAdamW
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.run.distributed.checkpoint import ShardedCheckpoints, training_parts
from trainer.run.distributed.rank_notes import RankNotes
from trainer.system.storage.atomic_folder import Disk

BATCH, VOCABULARY = 6, 300


def board(name: str, patience: float = 120.0) -> RankNotes:
    """Return a board of this world, whose ranks serve several tests."""
    store: Any = dist.distributed_c10d._get_default_store()
    prefixed = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    return RankNotes(prefixed, dist.get_rank(), dist.get_world_size(), patience=patience)


def progress(step: int) -> RunProgress:
    return RunProgress("run", step, 0, step * BATCH, 0, 0, {})


class Training:
    """A model, an optimizer and their checkpoints; samples follow from the step."""

    def __init__(
        self, model: str, output: str, settings: dict[str, Any], disk: Disk | None = None
    ) -> None:
        self.replica: ParallelReplica
        self.replica, self._config = parallel_replica(model, settings)
        parameters = self.replica.parameters
        self.optimizer = FusedAdamW(
            OptimizerConfig(), [([part], True) for part in parameters.values()]
        )
        self.optimizer.reset_moments()
        Training.count += 1
        self.checkpoints = ShardedCheckpoints(
            Path(output),
            training_parts(parameters, self.optimizer),
            self.replica.layout.digest,
            board(f"{output}/{Training.count}"),
            keep_last=2,
            disk=disk,
        )
        self.step = 0

    count = 0
    """Of this process's, which names a board."""

    def resume(self) -> int | None:
        """Go on from the newest checkpoint; return its step."""
        resumed = self.checkpoints.restore("run")
        if resumed is None:
            return None
        self.step = resumed.progress.step
        self.optimizer.resume_at(self.step)
        return self.step

    def train(self, steps: int, save_at: tuple[int, ...] = ()) -> list[float]:
        """Return the losses of so many steps."""
        losses: list[float] = []
        for _ in range(steps):
            batch = samples(self._config, BATCH, VOCABULARY, seed=self.step % 2)
            result = self.replica.accumulate([batch[i] for i in self.replica.local_samples(BATCH)])
            self.optimizer.step(0.01)
            self.step += 1
            losses.append(result.loss_sum / result.weight)
            if self.step in save_at:
                self.checkpoints.save(progress(self.step))
        self.checkpoints.close()
        return losses
