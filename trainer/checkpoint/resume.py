"""Where a run's checkpoints lie, and whether it may go on from the newest of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.store import FOLDER, CheckpointStore, Restored
from trainer.config.run import RunConfig
from trainer.errors import InputError
from trainer.storage import lease

if TYPE_CHECKING:
    from trainer.model.layout import GradientLayout


def checkpoint_folder(config: RunConfig) -> Path:
    """Return where checkpoints go; one elsewhere is linked from where readers look.

    Raises:
        InputError: something else is in the link's place.
    """
    usual = Path(config.output) / FOLDER
    if config.checkpoint.folder is None:
        if usual.is_symlink():
            raise InputError(
                f"{usual}: a link to {usual.readlink()}, from a run with checkpoint.folder; give "
                "that setting again, or another -o"
            )
        return usual
    folder = Path(config.checkpoint.folder).absolute()
    if usual.is_symlink() and usual.readlink() == folder:
        return folder
    if usual.is_symlink() or usual.exists():
        raise InputError(
            f"{usual}: holds other checkpoints than checkpoint.folder {folder}; give another -o"
        )
    try:
        usual.parent.mkdir(parents=True, exist_ok=True)
        usual.symlink_to(folder)
    except OSError as error:
        raise InputError(f"{usual}: cannot be written: {error.strerror}") from None
    return folder


def open_store(
    config: RunConfig, run_id: str, layout: GradientLayout, model_dir: Path
) -> CheckpointStore:
    """Return the store of a run's checkpoints, with the lease of their folder.

    Raises:
        InUseError: another process writes them.
        InputError: the folder is not writable, or the model directory is not usable.
    """
    folder = checkpoint_folder(config)
    held = lease.take(folder, run_id)
    try:
        return CheckpointStore(folder, layout, config, model_dir, lease=held)
    except BaseException:
        held.release()
        raise


def continue_run(
    store: CheckpointStore, run_id: str, config: RunConfig, data_digest: str
) -> Restored | None:
    """Return the newest intact checkpoint of a run, None for a run that begins.

    Raises:
        InputError: the folder is another run's, or this run's settings or data have changed.
    """
    restored = store.restore(run_id)
    if restored is None:
        if owner := store.owner():
            raise InputError(
                f"{store.folder}: holds the checkpoints of run {owner}; give another -o, or "
                f"--run-id {owner} to go on with that one"
            )
        return None
    progress = restored.progress
    if progress.data_digest != data_digest:
        what = "its data has changed"
    elif changes := RunConfig.model_validate(progress.config).changes(config):
        what = f"its settings have changed ({', '.join(changes)})"
    else:
        return restored
    raise InputError(
        f"{restored.path}: run {run_id} cannot go on from here: {what}; give another -o for a "
        "new run"
    )
