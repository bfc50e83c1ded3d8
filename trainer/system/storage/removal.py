"""Removal of folders: pins prevent it, a sweep removes what killed writers left.

A running writer holds a lock (flock) on its temporary folder, and a reader on what it reads. On
many network file systems such a lock is visible only on its own host. So the name of a temporary
folder contains its host: there the lock decides, elsewhere its age.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.system.errors import StorageError, convert_read_errors
from trainer.system.storage.atomic_folder import Disk, hidden_name, open_folder, original_name
from trainer.system.storage.host_identity import host_identity

FORGOTTEN = 3600.0
"""Seconds without a change after which another host's unfinished folder may be removed."""


@contextmanager
def pin_folder(folder: Path) -> Iterator[Path]:
    """Prevent this and other processes from removing a folder while it is read.

    Raises:
        StorageError: it was already removed.
    """
    with convert_read_errors(folder, StorageError):
        descriptor = open_folder(folder)
    try:
        with suppress(OSError):  # without locks a reader finds a missing file and reports it
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # The lock may be on a folder that was removed meanwhile.
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise StorageError(f"{folder}: was removed, use a newer one")
        yield folder
    finally:
        os.close(descriptor)


def remove_folder(disk: Disk, folder: Path, workspace: Path | None = None) -> bool:
    """Remove a folder unless a process of this host holds it; return whether it is gone.

    It is first renamed (into `workspace`), so that no reader finds half of it.
    """
    descriptor = _try_lock(folder)
    if descriptor is None:
        return False
    try:
        doomed = folder
        if not folder.name.startswith("."):
            doomed = (workspace or folder.parent) / hidden_name("tmp", folder.name)
            disk.rename(folder, doomed)
        disk.remove_tree(doomed)
    finally:
        os.close(descriptor)
    return True


def sweep_leftovers(disk: Disk, parent: Path, name: str = "*") -> None:
    """Remove what killed writers left; restore what one of them had just set aside.

    `name` limits it to one folder. What a writer on another host may still be using stays.
    """
    leftovers = _Leftovers(parent)
    for path in sorted(parent.glob(f".old-{name}-*")):
        if not leftovers.is_removable(path):
            continue
        original = path.with_name(original_name(path.name))
        if original.exists():
            remove_folder(disk, path)
        else:
            disk.rename(path, original)
    for path in parent.glob(f".tmp-{name}-*"):
        if leftovers.is_removable(path):
            remove_folder(disk, path)
    for pattern in (".link-*", ".probe-*"):
        for path in parent.glob(pattern):
            path.unlink(missing_ok=True)


class _Leftovers:
    """Tells remains of killed writers from folders being written; a lock decides."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._now: float | None = None

    def is_removable(self, path: Path) -> bool:
        """Return whether a hidden folder is this host's, or has not changed for a long time."""
        owner = path.name.rpartition("-")[2].partition(".")[0]
        if owner == host_identity():
            return True
        try:
            return self._file_server_time() - _last_touched(path) > FORGOTTEN
        except OSError:  # being removed or published, or unreadable
            return False

    def _file_server_time(self) -> float:
        """Return the file server's time, which also dates other hosts' files."""
        if self._now is None:
            probe = self._parent / f".probe-{secrets.token_hex(4)}"
            probe.touch()
            self._now = probe.stat().st_mtime
            probe.unlink(missing_ok=True)
        return self._now


def _last_touched(folder: Path) -> float:
    with os.scandir(folder) as entries:
        dates = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
    return max([folder.stat().st_mtime, *dates])


def _try_lock(folder: Path) -> int | None:
    """Return a descriptor with an exclusive lock, or None if another process holds the folder.

    Without locks on the file system, a reader finds missing files and takes the next checkpoint.
    """
    try:
        descriptor = open_folder(folder)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor
