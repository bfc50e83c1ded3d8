"""Files that are never seen half-written. Standard library only: the session keeper needs it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replace `path` by `data` in one step; readers see the old or the new content whole.

    The permissions are set before the first byte is written. `durable` waits for the disk;
    state that only describes living processes does not need that.

    Raises:
        OSError: the folder is missing, full or read-only; `path` is unchanged.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
