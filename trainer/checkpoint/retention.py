"""Select the checkpoints of a folder to keep once a newer one is safe."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.checkpoint.reader import complete_checkpoints, read_owner, read_step, step_folders
from trainer.system.storage import removal
from trainer.system.storage.atomic_folder import Disk


def prune_checkpoints(
    disk: Disk,
    newest: Path,
    run_id: str,
    keep_last: int,
    also: Iterable[Path] = (),
    workspace: Path | None = None,
) -> None:
    """Keep the last ones of a run, the newest, `also` and pinned ones; remove the rest."""
    complete = complete_checkpoints(newest.parent)
    own = [path for path in complete if read_owner(path) == run_id]
    kept = {path.name for path in (*own[:keep_last], newest, *also)}
    doomed = [path for path in own if path.name not in kept]
    # A damaged one is kept for inspection until a newer one is safe.
    older = (path for path in step_folders(newest.parent) if read_step(path) < read_step(newest))
    doomed += [path for path in older if path not in complete]
    for path in doomed:
        removal.remove_folder(disk, path, workspace)


def describe_older(folder: Path) -> str:
    """Return what a failed save has left in a folder of checkpoints."""
    if not folder.is_dir():
        return "the folder was removed, and every older one with it"
    return "older ones are intact" if any(step_folders(folder)) else "there is no older one"
