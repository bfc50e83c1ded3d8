"""Copy whole checkpoints between a run's output folder and an exported folder.

An exported folder comes back from elsewhere: `examine` refuses what is no checkpoint of the run
before anything in it is read, and files are opened without following a link.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import ConfigError
from trainer.checkpoint.reader import SHARDED, complete_checkpoints, owner_of, step_folders, step_of
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import Disk, FolderWriter, point, read_manifest

_PIECE = 4 << 20
_SMALL = 4 << 20
"""Bytes of a manifest or another description, at most."""
POINTERS = ("latest", "best")


def examine(folder: Path, target: Path, last_step: int | None) -> None:
    """Check the checkpoints of a folder from elsewhere, by names and sizes alone.

    Args:
        folder: of checkpoints, or with none.
        target: where they are copied to; its file system must have room for each.
        last_step: the run's last one, if it is known.

    Raises:
        ConfigError: one holds a link or what is no regular file, is too large, or is of no step of
            the run.
    """
    free = shutil.disk_usage(_existing(target)).free
    for path in (*step_folders(folder), *step_folders(folder / SHARDED)):
        if last_step is not None and step_of(path) > last_step:
            raise ConfigError(f"{path}: the run has {last_step} steps; remove this checkpoint")
        entries = [path, *path.rglob("*")]
        for entry in entries:
            kind = entry.lstat().st_mode
            if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
                raise ConfigError(f"{entry}: is no regular file; a checkpoint holds no others")
            if entry.suffix == ".json" and entry.lstat().st_size > _SMALL:
                raise ConfigError(f"{entry}: is larger than {_SMALL >> 20} MiB; copy it again")
        size = sum(entry.lstat().st_size for entry in entries)
        if size > free:
            raise ConfigError(f"{path}: has {size:,} bytes, {target} has room for {free:,}")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def newest(folder: Path, run_id: str) -> Path | None:
    """Return a run's newest complete checkpoint, whole or in parts; None if there is none."""
    found = [*complete_checkpoints(folder), *complete_checkpoints(folder / SHARDED)]
    own = [path for path in found if owner_of(path) == run_id]
    return max(own, key=step_of, default=None)


def owners(folder: Path) -> set[str]:
    """Return the ids of the runs whose checkpoints are in a folder."""
    found = [*complete_checkpoints(folder), *complete_checkpoints(folder / SHARDED)]
    return {owner for owner in map(owner_of, found) if owner is not None}


def bring(source: Path, target: Path, run_id: str, workspace: Path | None = None) -> list[Path]:
    """Copy the newest checkpoint of a run, and the one that `best` points to; return the copies.

    Every byte is compared with the manifest on the way; a copy appears whole or not at all. A
    checkpoint that is there already stays.

    Args:
        source, target: folders of checkpoints.
        workspace: where copies grow, on `target`'s file system; None: in `target`.

    Raises:
        ConfigError: a checkpoint is damaged, or differs from the one of its name in `target`.
        OSError: the disk is full, or a folder cannot be written.
    """
    wanted = {path: path.parent.name == SHARDED for path in [newest(source, run_id)] if path}
    pointed: dict[str, str] = {}
    for pointer in POINTERS:
        link = source / pointer
        # A name alone is taken from a link: it leads nowhere but into its folder.
        path = source / link.readlink().name if link.is_symlink() else None
        if path in complete_checkpoints(source) and owner_of(path) == run_id:
            wanted.setdefault(path, False)
            pointed[pointer] = path.name
    made: list[Path] = []
    for path, in_parts in sorted(wanted.items(), key=lambda one: step_of(one[0])):
        parent = target / SHARDED if in_parts else target
        parent.mkdir(parents=True, exist_ok=True)
        made.append(_copy(path, parent, workspace))
    for pointer, name in pointed.items():
        point(Disk(), target, pointer, name, workspace)
    return made


def _copy(source: Path, parent: Path, workspace: Path | None) -> Path:
    target = parent / source.name
    try:
        records = read_manifest(source)
        if target.exists() and read_manifest(target) == records:
            return target
        if target.exists():
            raise ConfigError(
                f"{target}: differs from {source}: the run continued in both places; remove the one"
                " that you do not want"
            )
        writer = FolderWriter(Disk(), parent, source.name, workspace)
        try:
            for name, record in records.items():
                if writer.add(name, _pieces(source / name)) != record:
                    raise StorageError(f"{source / name}: its bytes are not those in the manifest")
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise
    except StorageError as error:
        raise ConfigError(f"{error}; copy it again, or remove {source}") from None


def _pieces(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
