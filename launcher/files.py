"""The state folder and its permissions. Standard library only."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

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
