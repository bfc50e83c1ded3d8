"""The state folder, and files that are never seen half-written. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path

SHARE = "/srv/motley"
"""The share of a host with the role `share`, unless motley_share_folder names another folder."""
MANAGED_STATE = "/var/lib/motley"
"""Where the trainer role keeps the runs of a host, which is also the run user's home."""


def write_atomically(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Replace `path` by `data` atomically; readers see either the old or the new content.

    The permissions are set before the first byte is written. `durable` waits for the disk;
    state that only describes running processes does not need it.

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


def default_state_folder() -> Path:
    """Return this user's folder of runs; for an installation of the trainer role, the role's
    folder.

    Else $MOTLEY_STATE_DIR, $XDG_STATE_HOME/motley, or ~/.local/state/motley.
    """
    if override := os.environ.get("MOTLEY_STATE_DIR"):
        return Path(override).absolute()
    record = Path(sys.prefix, "motley.json")
    with contextlib.suppress(OSError):
        if record.stat().st_uid == os.getuid():
            return Path(MANAGED_STATE)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "motley"


def make_private_folder(path: Path) -> None:
    """Create a folder and its parents, accessible only by this user."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
