"""Create the objects of a rank of `--distributed`, as in `composition.run`; imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from torch import device
from torch._C._distributed_c10d import PrefixStore, Store

from trainer.checkpoint.reader import SHARDED, Resumed, RunProgress, read_progress, read_step
from trainer.checkpoint.resume import (
    checkpoint_path,
    continue_run,
    newest_checkpoint,
    refuse_changes,
)
from trainer.checkpoint.store import CheckpointStore, Reopened
from trainer.checkpoint.stored_state import StoredState
from trainer.data.tokens import Dataset
from trainer.replica.torch.parallel.mesh import make_mesh
from trainer.replica.torch.parallel.replica import ParallelReplica
from trainer.replica.torch.recomputation import agree_on_recomputation
from trainer.run.composition.record import Guards, open_record
from trainer.run.distributed.checkpoint import ShardedCheckpoints, training_parts
from trainer.run.distributed.environment import Environment
from trainer.run.distributed.gathered_checkpoint import GatheredCheckpoints
from trainer.run.distributed.loop import Checkpoints, DistributedRun
from trainer.run.distributed.optimizer import ParallelAdamW
from trainer.run.distributed.rank_notes import RankNotes
from trainer.run.distributed.rank_reports import RankReport, prepare_on_first_rank
from trainer.run.distributed.sharded_checkpoint import ShardedSaves
from trainer.run.distributed.weight_audit import WeightAudit
from trainer.run.inputs import RunInputs
from trainer.system.process.stop_signals import StopRequest
from trainer.tracking.run_file import write_run_file
from trainer.tracking.run_recorder import RunRecorder, make_progress


def make_distributed(
    inputs: RunInputs,
    environment: Environment,
    guards: Guards | None,
    store: Store,
    members: Sequence[RankReport],
    device: device,
    stop: StopRequest,
    explaining: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> DistributedRun:
    """Return this rank's part of a run at step 0, or at the run's newest checkpoint.

    Rank 0 alone reads and writes the output folder.

    Args:
        guards: rank 0's.
        explaining: `RankWatch.explain_errors`.

    Raises:
        TrainerError: on every rank, what rank 0 found: the checkpoints are another run's, or
            another process writes them.
        InputError: the model cannot be loaded.
    """
    config, layout, plan, train = inputs.config, inputs.layout, inputs.plan, inputs.train
    assert isinstance(train, Dataset)

    rank, world, patience = environment.rank, environment.world_size, config.exchange.join_deadline
    opens = partial(_open_record, inputs, world, guards or Guards())
    opened, positions = prepare_on_first_rank(
        store, rank, world, patience, opens, _Opened.describe_to_ranks
    )
    recorder = opened and opened.recorder
    resumed: Resumed | None = opened and opened.restored
    step, generation, parts_first, whole = positions
    with recorder.closed_on_failure() if recorder else nullcontext(), explaining():
        replica = ParallelReplica(
            inputs.model_dir,
            config,
            layout,
            make_mesh(config.parallel, world, device.type),
            device,
            recompute=agree_on_recomputation(config, inputs.model_dir, device),
        )
        optimizer = ParallelAdamW(config.optimizer, layout, replica.parameters, replica.copy_counts)
        if step:
            optimizer.restore(opened and opened.stored, step)
        sharded = None
        if config.checkpoint.sharded or parts_first:
            board = RankNotes(
                PrefixStore(SHARDED, store.clone()),  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
                rank,
                world,
                patience=config.parallel.timeout,
            )
            sharded = ShardedCheckpoints(
                checkpoint_path(config) / SHARDED,
                training_parts(replica.parameters, optimizer.torch),
                layout.digest,
                board,
                keep_last=config.checkpoint.keep_last,
                lease=opened and opened.store.lease,
            )
            if parts_first:
                resumed = _restore_sharded(sharded, board, opened, inputs, optimizer, whole)
                if resumed is not None:
                    step, generation = resumed.progress.step, resumed.progress.generation + 1
    if recorder is not None:
        recorder.resume(resumed)
        for member in members:
            recorder.emit(
                {
                    "event": "joined",
                    "rank": member.rank,
                    "host": member.host,
                    "device": member.device,
                    "backend": device.type,
                    "backend_reason": "",
                }
            )
    checkpoints: Checkpoints = GatheredCheckpoints(replica, optimizer, recorder, generation)
    if sharded is not None and config.checkpoint.sharded:

        def progress_at_step(at: int) -> RunProgress:
            found = make_progress(at, generation, config, inputs.job, plan)
            return replace(found, early_stopping=recorder.early.counted if recorder else None)

        checkpoints = ShardedSaves(sharded, checkpoints, whole, progress_at_step, recorder)
    elif sharded is not None:
        sharded.close()
    return DistributedRun(
        config=config,
        plan=plan,
        replica=replica,
        optimizer=optimizer,
        audit=WeightAudit(replica.parameters, [f"rank {m.rank} on {m.host}" for m in members]),
        checkpoints=checkpoints,
        train=train,
        validation=inputs.validation,
        recorder=recorder,
        stop=stop,
        step=step,
        generation=generation,
    )


@dataclass(frozen=True)
class _Opened:
    """The files that rank 0 has opened in the output folder, and their state."""

    recorder: RunRecorder
    store: CheckpointStore
    restored: Reopened | None
    """Nothing if a sharded one is newer, or as new."""
    sharded: bool
    whole: int
    """The newest step that is saved in one process's form; 0 without."""

    @property
    def stored(self) -> StoredState | None:
        return self.restored and self.restored.stored

    def describe_to_ranks(self) -> tuple[int, int, bool, int]:
        """Return what the other ranks need: step and generation of `restored`, and the rest."""
        progress = self.restored and self.restored.progress
        step, generation = (progress.step, progress.generation + 1) if progress else (0, 0)
        return step, generation, self.sharded, self.whole


def _open_record(inputs: RunInputs, expect_workers: int, guards: Guards) -> _Opened:
    """Open the record of a run in its output folder, and find where it resumes."""
    config, job = inputs.config, inputs.job
    with open_record(inputs, expect_workers, guards) as (store, make_recorder):
        restored = None
        newest = newest_checkpoint(store.folder, job.run_id)
        whole = read_step(newest) if newest else 0
        parts = newest_checkpoint(store.folder / SHARDED, job.run_id)
        sharded = parts is not None and read_step(parts) >= whole
        if parts is not None and sharded:
            refuse_changes(parts, read_progress(parts), config, job)
        else:
            restored = continue_run(store, store.reopen, job.run_id, config, job)
        write_run_file(config, job.run_id)
        recorder = make_recorder(inputs.plan)
    return _Opened(recorder, store, restored, sharded, whole)


def _restore_sharded(
    sharded: ShardedCheckpoints,
    board: RankNotes,
    opened: _Opened | None,
    inputs: RunInputs,
    optimizer: ParallelAdamW,
    whole: int,
) -> Resumed | None:
    """Read the newest sharded checkpoint into the ranks' tensors.

    If it is damaged, a whole one that is newer than the next is read instead.
    """
    run_id = inputs.job.run_id
    resumed = sharded.restore(run_id)
    reached = resumed.progress.step if resumed else 0
    if resumed is not None:
        optimizer.torch.resume_at(reached)
    if reached >= whole:
        return resumed
    restored = opened and opened.store.reopen(run_id)
    note = restored and [str(restored.path), asdict(restored.progress)]
    found = board.broadcast_note("whole checkpoint", note)
    if found is None or found[1]["step"] <= reached:
        return resumed
    path, progress = Path(found[0]), RunProgress(**found[1])
    optimizer.restore(restored and restored.stored, progress.step)
    return Resumed(path, progress, ())
