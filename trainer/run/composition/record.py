"""Open the record of a run: its output folder, its checkpoints and what writes to both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.reader import SHARDED, complete_checkpoints
from trainer.checkpoint.resume import checkpoint_path, open_store
from trainer.checkpoint.store import CheckpointStore
from trainer.config.run import RunConfig
from trainer.exchange.protocol.schedule import StepPlan
from trainer.planning.budget.budget_watch import BudgetWatch
from trainer.run.inputs import RunInputs
from trainer.system.errors import StorageError
from trainer.system.storage import lease
from trainer.tracking.metrics import METRICS_FILE, read_metrics
from trainer.tracking.notifier import Notifier
from trainer.tracking.run_recorder import RunRecorder


@dataclass(frozen=True)
class Guards:
    """Guards of a run from its start on, before there is anything to record."""

    budget: BudgetWatch | None = None
    notifier: Notifier | None = None


def refuse_lost_checkpoints(config: RunConfig) -> None:
    """Refuse to begin at step 0 where the output folder records checkpoints that are gone.

    A folder on a share that is not mounted yet comes back: the error's exit code allows another
    attempt. Call it before a lease is taken, which would make the folder.

    Raises:
        StorageError: the folder of checkpoints is missing, or holds no complete one.
    """
    record, folder = Path(config.output) / METRICS_FILE, checkpoint_path(config)
    if complete_checkpoints(folder) or complete_checkpoints(folder / SHARDED):
        return
    lines = read_metrics(record) if record.is_file() else []
    saved = [line["step"] for line in lines if line.get("event") == "checkpoint"]
    if saved:
        what = "contains no complete checkpoint" if folder.is_dir() else "is missing"
        raise StorageError(
            f"{folder}: {what}, though {record} records one of step {saved[-1]}; mount or restore "
            "that folder to resume there, or give another -o to begin at step 0"
        )


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
            held = lease.acquire_lease(output, job.run_id, beside=checkpoint_path(config))
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
