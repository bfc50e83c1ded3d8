"""Locate a run's checkpoints, and check whether it may resume from the newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.checkpoint.reader import (
    FOLDER,
    RUN_FILE,
    SHARDED,
    complete_checkpoints,
    read_owner,
    read_step,
)
from trainer.checkpoint.store import CheckpointStore, Found, RunProgress
from trainer.config.run import SCRIPT, RunConfig
from trainer.config.section import build_settings
from trainer.system.errors import InputError
from trainer.system.storage import lease

if TYPE_CHECKING:
    from trainer.model.layout import GradientLayout


class Identity(Protocol):
    """The contents of data and model, by their digests."""

    @property
    def data_digest(self) -> str:
        """The digest of all data."""
        ...

    @property
    def model_digest(self) -> str:
        """The digest of config, weights and tokenizer."""
        ...

    @property
    def base_digest(self) -> str | None:
        """The digest of the weights alone."""
        ...


def checkpoint_path(config: RunConfig) -> Path:
    """Return the absolute path of the folder of checkpoints."""
    return Path(config.checkpoint.folder or Path(config.output) / FOLDER).absolute()


def checkpoint_folder(config: RunConfig) -> Path:
    """Return the folder of checkpoints; one elsewhere is linked from where readers look.

    Raises:
        InputError: something else has the link's name.
    """
    usual = Path(config.output) / FOLDER
    if config.checkpoint.folder is None:
        if usual.is_symlink():
            raise InputError(
                f"{usual}: a link to {usual.readlink()}, from a run with checkpoint.folder; give "
                "that setting again, or another -o"
            )
        return usual
    folder = checkpoint_path(config)
    if usual.is_symlink() and usual.readlink() == folder:
        return folder
    if usual.is_symlink() or usual.exists():
        raise InputError(
            f"{usual}: contains other checkpoints than checkpoint.folder {folder}; give another -o"
        )
    try:
        usual.parent.mkdir(parents=True, exist_ok=True)
        usual.symlink_to(folder)
    except OSError as error:
        raise InputError(f"{usual}: cannot be written: {error.strerror}") from None
    return folder


def open_store(
    config: RunConfig,
    run_id: str,
    layout: GradientLayout,
    model_dir: Path,
    output: lease.Lease,
) -> CheckpointStore:
    """Return the store of a run's checkpoints, with the lease of their folder.

    Args:
        output: the lease of the output folder, taken with `checkpoint_path` beside it.

    Raises:
        InUseError: another process writes them.
        InputError: the folder is not writable, or the model directory is not usable.
    """
    folder = checkpoint_folder(config)
    held = lease.acquire_lease(folder, run_id, after=output)
    try:
        return CheckpointStore(folder, layout, config, model_dir, lease=held)
    except BaseException:
        held.release()
        raise


def continue_run(
    store: CheckpointStore,
    restore: Callable[[str], Found | None],
    run_id: str,
    config: RunConfig,
    job: Identity,
) -> Found | None:
    """Return the newest intact checkpoint of a run, None if there is none.

    Args:
        restore: the store's `restore` or `reopen`.

    Raises:
        InputError: the folder is another run's, this run's settings or data have changed, or a
            sharded one is newer.
    """
    restored = restore(run_id)
    reached = -1 if restored is None else restored.progress.step
    sharded = newest_checkpoint(store.folder / SHARDED, run_id)
    if sharded is not None and read_step(sharded) > reached:
        raise InputError(
            f"{sharded}: the newest checkpoint is sharded, which only --distributed reads; resume"
            " with it, or give another -o for a new run"
        )
    if restored is None:
        owner = store.read_owner()
        owner = owner or next(map(read_owner, complete_checkpoints(store.folder / SHARDED)), None)
        if owner == run_id:
            raise InputError(
                f"{store.folder}: no checkpoint of this run is intact (the log says why); restore "
                "one, or give another -o to begin at step 0"
            )
        if owner:
            places = "-o" if config.checkpoint.folder is None else "checkpoint.folder and -o"
            raise InputError(
                f"{store.folder}: contains the checkpoints of run {owner}; give another {places}, "
                "or "
                f"--run-id {owner} to resume that run"
            )
        return None
    refuse_changes(restored.path, restored.progress, config, job)
    return restored


def newest_checkpoint(folder: Path, run_id: str) -> Path | None:
    """Return a run's newest complete checkpoint in a folder."""
    return next((path for path in complete_checkpoints(folder) if read_owner(path) == run_id), None)


def refuse_changes(path: Path, progress: RunProgress, config: RunConfig, job: Identity) -> None:
    """Refuse to resume a run whose settings, data or model have changed.

    Raises:
        InputError: they have; names them.
    """
    if progress.data_digest != job.data_digest:
        what = "its data has changed"
    elif config.task == SCRIPT and progress.model_digest != job.model_digest:
        what = "its script has changed, or makes other frozen weights"
    elif progress.base_digest != job.base_digest:
        what = f"its model has changed (other weights in {config.model.path})"
    elif progress.model_digest != job.model_digest:
        what = f"its model has changed (other config or tokenizer in {config.model.path})"
    elif changes := _read_settings(path, progress).list_changes(config):
        what = f"its settings have changed ({', '.join(changes)})"
    else:
        return
    raise InputError(
        f"{path}: run {progress.run_id} cannot resume from here: {what}; give another -o for a "
        "new run"
    )


def _read_settings(path: Path, progress: RunProgress) -> RunConfig:
    try:
        return build_settings(RunConfig, progress.config, {}, path / RUN_FILE)
    except InputError as error:
        raise InputError(f"{error}; it is of another version: give another -o") from None
