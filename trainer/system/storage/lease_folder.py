"""A lease on disk: the folder `.lease-000007/`, with its holder, heartbeat and workspace.

It appears whole, by a rename that succeeds for exactly one process, and the highest number is
valid. The folder with the highest number is never removed, so the numbers only grow.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainer.system.regular_file import read_file
from trainer.system.storage.atomic_file import replace_file
from trainer.system.storage.atomic_folder import hidden_name, original_name
from trainer.system.storage.host_identity import host_identity
from trainer.system.storage.jsonl import json_text
from trainer.system.timestamp import format_timestamp
from trainer.system.untrusted_data import validate_data, validate_json

SCHEMA = "motley.lease/1"
_PREFIX, _HOLDER, _HEARTBEAT = ".lease-", "holder.json", "beat"
_ASKING = "lease"
"""In the name of a lease that has no number yet."""
_LOST_RACE = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)  # ENOENT: the winner removed it

State = Literal["held", "released"]
Heartbeat = tuple[Path, int, bytes]
"""A folder, its lease's number and the bytes of the heartbeat: a later one differs."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lease, as text for people."""

    run_id: str
    pid: int
    host: str
    identity: str
    since: str

    def __str__(self) -> str:
        return f"run {self.run_id}, pid {self.pid} on host {self.host}, since {self.since}"


def lease_path(folder: Path, number: int) -> Path:
    """Return the path of the lease of a number."""
    return folder / f"{_PREFIX}{number:06d}"


def newest_lease(folder: Path) -> int | None:
    """Return the valid number, None if the folder never had a lease."""
    names = (path.name for path in folder.iterdir())
    found = (name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
    return max((int(number) for number in found if number.isdecimal()), default=None)


def create_lease(folder: Path, number: int, run_id: str) -> int | None:
    """Create the lease of this number; return a descriptor that locks it, None if another won.

    Raises:
        OSError: the folder is unreachable, or the disk is full.
    """
    path = folder / hidden_name("tmp", _ASKING)
    path.mkdir()
    descriptor, won = -1, False
    try:
        # A file opened for writing: NFS has no locks on folders.
        descriptor = os.open(path / _HEARTBEAT, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # a file system without locks: heartbeats decide
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_heartbeat(path, 0)
        since = format_timestamp()
        holder = Holder(run_id, os.getpid(), socket.gethostname(), host_identity(), since)
        tree = {"schema": SCHEMA, "state": "held", **vars(holder)}
        (path / _HOLDER).write_text(json_text(tree) + "\n", encoding="utf-8")
        # A non-empty folder is never replaced, so one process gets the number.
        path = path.rename(lease_path(folder, number))
        won = newest_lease(folder) == number  # else it was free because it is outdated
    except OSError as error:
        if error.errno not in _LOST_RACE:
            raise
    finally:
        if not won:
            shutil.rmtree(path, ignore_errors=True)
            if descriptor >= 0:
                os.close(descriptor)
    return descriptor if won else None


def clear_requests(folder: Path, workspace: Path) -> None:
    """Remove what others wrote to ask for a lease: they ask again, or were killed meanwhile.

    Each leaves the folder whole, by a rename into the workspace: half of one is never a lease.

    Raises:
        OSError: the folder is unreachable.
    """
    for path in folder.glob(".tmp-*"):
        if original_name(path.name) != _ASKING:
            continue
        try:
            shutil.rmtree(path.rename(workspace / path.name), ignore_errors=True)
        except OSError as error:
            if error.errno not in _LOST_RACE:
                raise


def remove_lease(workspace: Path, folder: Path) -> None:
    """Remove the lease of a predecessor; restore what it had set aside and not replaced.

    The predecessor may be writing in it; once the folder is gone it cannot.

    Raises:
        OSError: it cannot be removed.
    """
    while True:
        try:
            entries = list(workspace.iterdir())  # `exists` would call one that fails gone
        except FileNotFoundError:
            return
        for path in entries:
            original = folder / original_name(path.name)
            if path.name.startswith(".old-") and not original.exists():
                path.rename(original)
            elif path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        try:
            workspace.rmdir()
        except OSError as error:
            if error.errno not in _LOST_RACE:
                raise


def read_holder(path: Path) -> tuple[Holder | None, State]:
    """Return the holder of a lease, None if unreadable, and whether it was released."""
    with suppress(OSError, ValueError):
        tree = validate_json(dict[str, Any], read_file(path / _HOLDER), _HOLDER, least=0)
        if tree.get("schema") == SCHEMA:
            state: State = "released" if tree.get("state") == "released" else "held"
            return validate_data(Holder, tree, _HOLDER), state
    return None, "held"


def mark_released(path: Path) -> None:
    """Mark that a lease may be taken over at once.

    Raises:
        OSError: it cannot be written.
    """
    tree = json.loads(read_file(path / _HOLDER))
    replace_file(path / _HOLDER, json_text({**tree, "state": "released"}) + "\n")


def is_locked(path: Path) -> bool | None:
    """Return whether a process of this host holds a lease; None if there are no locks.

    Raises:
        OSError: the lease no longer exists.
    """
    descriptor = os.open(path / _HEARTBEAT, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two may ask at once
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def read_heartbeat(path: Path) -> bytes:
    """Return the heartbeat of a lease, which changes each time that its holder writes it."""
    return read_file(path / _HEARTBEAT)


def newest_heartbeat(folder: Path | None) -> Heartbeat | None:
    """Return the newest heartbeat in a folder; None without one, or if it cannot be read."""
    if folder is None:
        return None
    with suppress(OSError):
        number = newest_lease(folder)
        if number is not None:
            return folder.absolute(), number, read_heartbeat(lease_path(folder, number))
    return None


def write_heartbeat(path: Path, count: int) -> None:
    """Write a heartbeat; never creates the file, so that an ended lease stays ended.

    Raises:
        OSError: ENOENT or ESTALE if the lease has ended or the folder is unreachable.
    """
    descriptor = os.open(path / _HEARTBEAT, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"{count:012d}\n".encode())
    finally:
        os.close(descriptor)
