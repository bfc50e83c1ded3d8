"""Open the record of a run: its output folder, its checkpoints and what writes to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.resume import checkpoint_path, open_store
from trainer.checkpoint.store import CheckpointStore
from trainer.exchange.protocol.schedule import StepPlan
from trainer.planning.budget.watch import BudgetWatch
from trainer.run.inputs import RunInputs
from trainer.system.storage import lease
from trainer.tracking.notifier import Notifier
from trainer.tracking.run_recorder import RunRecorder


@dataclass(frozen=True)
class Guards:
    """What accompanies a run from its start on, before there is anything to record."""

    budget: BudgetWatch | None = None
    notifier: Notifier | None = None


@contextmanager
def open_record(
    inputs: RunInputs,
    expect_workers: int,
    guards: Guards,
    held: lease.Lease | None = None,
) -> Iterator[tuple[CheckpointStore, Callable[[StepPlan], RunRecorder]]]:
    """Open the store of a run, and yield it with what makes the recorder for a plan.

    Both stay open after the block; if that fails, they are left to the next attempt.

    Args:
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
            lambda plan: RunRecorder(
                *(output, store, config, job, plan, expect_workers, held),
                budget=guards.budget,
                notifier=guards.notifier,
            ),
        )
        until_made.pop_all()
