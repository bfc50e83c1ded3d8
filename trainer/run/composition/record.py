"""Open the record of a run: its output folder, its checkpoints and what writes to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.checkpoint.resume import checkpoint_path, open_store
from trainer.checkpoint.store import CheckpointStore
from trainer.exchange.protocol.schedule import StepPlan
from trainer.planning.budget.watch import BudgetWatch
from trainer.run.inputs import RunInputs
from trainer.system.storage import lease
from trainer.tracking.run_recorder import RunRecorder


@contextmanager
def open_record(
    inputs: RunInputs,
    expect_workers: int,
    watch: BudgetWatch | None,
    held: lease.Lease | None = None,
) -> Iterator[tuple[CheckpointStore, Callable[[StepPlan], RunRecorder]]]:
    """Open the store of a run, and yield it with what makes the recorder for a plan.

    Both stay open after the block; if that fails, they are left to the next attempt.

    Args:
        watch: the guard of the run's budget.
        held: the lease of the output folder, where it was taken before.

    Raises:
        InputError: the folder of checkpoints or the model cannot be used.
        InUseError: another process writes the output folder or the checkpoints.
    """
    config, job, output = inputs.config, inputs.job, Path(inputs.config.output)
    with ExitStack() as until_made:
        if held is None:
            held = lease.take(output, job.run_id, beside=checkpoint_path(config))
            until_made.callback(held.release)
        store = open_store(config, job.run_id, inputs.layout, inputs.model_dir, held)
        until_made.callback(store.release)
        yield (
            store,
            lambda plan: RunRecorder(output, store, config, job, plan, expect_workers, held, watch),
        )
        until_made.pop_all()
