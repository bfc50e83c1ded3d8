"""Files and links that are never seen half-written, for both programs. Standard library only."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def write_atomically(
    path: Path,
    data: bytes,
    mode: int | None = 0o600,
    durable: bool = True,
    workspace: Path | None = None,
) -> None:
    """Replace `path` by `data` atomically; readers see either the old or the new content.

    The permissions (None: those of the umask) are set before the first byte is written. `durable`
    waits for the disk. State that only describes a running process does not need it; it has one
    writer, whose temporary name is fixed, so that killed ones leave one file at most. The temporary
    file is in `workspace`, a folder of the same file system, or beside `path`.

    Raises:
        OSError: the folder is missing, full or read-only; `path` is unchanged.
    """
    name = f".{path.name}.{secrets.token_hex(4) if durable else 'tmp'}"
    fresh = (workspace or path.parent) / name
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
