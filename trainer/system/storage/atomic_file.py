"""Files and links that are never seen half-written, for both programs. Standard library only."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(
    path: Path, data: bytes, mode: int | None = 0o600, durable: bool = True
) -> None:
    """Replace `path` by `data` atomically; readers see either the old or the new content.

    The permissions (None: those of the umask) are set before the first byte is written. `durable`
    waits for the disk. State that only describes a running process does not need it; it has one
    writer, whose temporary name is fixed, so that killed ones leave one file at most.

    Raises:
        OSError: the folder is missing, full or read-only; `path` is unchanged.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4) if durable else 'tmp'}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if durable else os.O_TRUNC)
    try:
        descriptor = os.open(fresh, flags, 0o666 if mode is None else 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            if mode is not None:
                os.fchmod(descriptor, mode)
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(descriptor)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_NO_HARD_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.ENOSYS))
"""What exFAT, and file systems that are themselves programs, say of a hard link."""


def create_atomically(path: Path, data: bytes) -> bool:
    """Create `path`, whole; False if it exists. Of any number of processes one succeeds.

    Over NFS too: there a link is made by one request (RFC 1813, 3.3.15). What is written aside has
    a hidden name; a file system without hard links shows the file while it is being written.

    Raises:
        OSError: the folder is missing, full or read-only; `path` is not there, may be tried again.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_new(fresh, data)
        return _link(fresh, path)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
    finally:
        with suppress(OSError):
            fresh.unlink()
    try:
        _write_new(path, data)
    except FileExistsError:
        return False
    return True


def _write_new(path: Path, data: bytes) -> None:
    """Create and sync a file, which is removed if that fails."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(descriptor)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _link(fresh: Path, path: Path) -> bool:
    """Link a file as `path`; False if another one has that name."""
    try:
        os.link(fresh, path)
    except FileExistsError:
        # An NFS client whose first answer was lost asks again, and finds its own link.
        return fresh.samefile(path)
    return True


def replace_file(path: Path, text: str) -> None:
    """Replace a text that describes a running process, which is its only writer; not synced.

    Raises:
        OSError: the old file is unchanged.
    """
    write_atomically(path, text.encode(), mode=None, durable=False)


def link_atomically(path: Path, shown: Path) -> None:
    """Let the symbolic link `path` show another place, in one step. One writer at a time.

    Raises:
        OSError: the old link is unchanged.
    """
    fresh = path.with_name(f".link-{path.name}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(shown)
    fresh.replace(path)
