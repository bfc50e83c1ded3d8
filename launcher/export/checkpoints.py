"""Copy a run's checkpoints from its output folder into the folder of an export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import ConfigError
from trainer.checkpoint.reader import SHARDED, complete_checkpoints, owner_of, step_of
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import Disk, FolderWriter, point, read_manifest

_PIECE = 4 << 20
POINTERS = ("latest", "best")


def newest(folder: Path, run_id: str) -> Path | None:
    """Return a run's newest complete checkpoint, whole or in parts; None if there is none."""
    found = [*complete_checkpoints(folder), *complete_checkpoints(folder / SHARDED)]
    own = [path for path in found if owner_of(path) == run_id]
    return max(own, key=step_of, default=None)


def bring(source: Path, target: Path, run_id: str) -> list[Path]:
    """Copy the newest checkpoint of a run, and the one that `best` points to; return the copies.

    Every byte is compared with the manifest on the way.

    Args:
        source, target: folders of checkpoints; `target` has none yet.

    Raises:
        ConfigError: a checkpoint is damaged.
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
        made.append(_copy(path, parent))
    for pointer, name in pointed.items():
        point(Disk(), target, pointer, name)
    return made


def _copy(source: Path, parent: Path) -> Path:
    try:
        records = read_manifest(source)
        writer = FolderWriter(Disk(), parent, source.name)
        try:
            for name, record in records.items():
                if writer.add(name, _pieces(source / name)) != record:
                    raise StorageError(f"{source / name}: its bytes are not those in the manifest")
            return writer.publish()
        except BaseException:
            writer.abandon()
            raise
    except StorageError as error:
        raise ConfigError(f"{error}; remove {source}, or copy it again") from None


def _pieces(path: Path) -> Iterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        while piece := file.read(_PIECE):
            yield piece
