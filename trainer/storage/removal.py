"""What keeps a folder from being removed, and what removes it: pins, and sweeping up.

A writer that lives holds a lock (flock) on its temporary folder, and so does a reader on what it
reads. On many network file systems such a lock is seen on its own host alone. So the name of a
temporary folder names its host: there the lock decides, elsewhere its age.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import StorageError
from trainer.storage.atomic_folder import Disk, hidden_name, open_folder, original_name
from trainer.storage.host_identity import host_identity

FORGOTTEN = 3600.0
"""Seconds after which what another host began to write, and did not touch again, is litter."""


@contextmanager
def pin(folder: Path) -> Iterator[Path]:
    """Keep a folder from being removed while it is read, by this or another process.

    Raises:
        StorageError: it was removed already.
    """
    try:
        descriptor = open_folder(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}") from None
    try:
        with suppress(OSError):  # without locks a reader meets a missing file, and says so
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        # The lock may have been granted on a folder that was removed while we waited.
        if not folder.exists() or not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise StorageError(f"{folder}: was removed, take a newer one")
        yield folder
    finally:
        os.close(descriptor)


def remove(disk: Disk, folder: Path, workspace: Path | None = None) -> bool:
    """Remove a folder unless a process of this host holds it; return whether it is gone.

    It disappears by a rename first (into `workspace`), so that no reader finds half of it.
    """
    descriptor = _lock(folder)
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


def sweep(disk: Disk, parent: Path, name: str = "*") -> None:
    """Remove what dead writers left behind; bring back what one of them had just set aside.

    `name` narrows it to one folder. What a writer on another host may still be at work on stays.
    """
    litter = _Litter(parent)
    for path in sorted(parent.glob(f".old-{name}-*")):
        if not litter.holds(path):
            continue
        original = path.with_name(original_name(path.name))
        if original.exists():
            remove(disk, path)
        else:
            disk.rename(path, original)
    for path in parent.glob(f".tmp-{name}-*"):
        if litter.holds(path):
            remove(disk, path)
    for pattern in (".link-*", ".probe-*"):
        for path in parent.glob(pattern):
            path.unlink(missing_ok=True)


class _Litter:
    """Tells what a dead writer left from what is being written; a lock has the last word."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._now: float | None = None

    def holds(self, path: Path) -> bool:
        """Whether a hidden folder is this host's, or was not touched for a long time."""
        owner = path.name.rpartition("-")[2].partition(".")[0]
        if owner == host_identity():
            return True
        try:
            return self._file_server_time() - _last_touched(path) > FORGOTTEN
        except OSError:  # it is being removed or published, or cannot be judged
            return False

    def _file_server_time(self) -> float:
        """Return the time by the clock that also dates what other hosts write here."""
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


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder alone, or None when another process has it.

    Where the file system has no locks none can be held: a reader then meets missing files, and
    takes the next checkpoint.
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
