"""The state folder, its permissions, and lock files. Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from launcher.errors import PreflightError

SHARE = "/srv/motley"
"""The share of a host with the role `share`, unless motley_share_folder names another folder."""
MANAGED_STATE = "/var/lib/motley"
"""Where the trainer role keeps the runs of a host, which is also the run user's home."""


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


@contextlib.contextmanager
def hold_lock(path: Path, holder: str, complain: Callable[[str], str]) -> Generator[None]:
    """Hold a lock file; the kernel frees it when its holder dies, whatever the cause.

    Args:
        holder: who holds it, for others to read.
        complain: makes of another's `holder` what is wrong and what to do.

    Raises:
        PreflightError: another process holds it.
        OSError: the file cannot be made or written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise PreflightError(complain(other or "just now")) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, holder.encode(), 0)
        yield
    finally:
        os.close(descriptor)
