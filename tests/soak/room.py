"""The room a soak runs in: a small disk of its own, without root.

A user namespace with a mount namespace is all it takes; where the kernel forbids that, the soak
runs without it and leaves the full disk out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_ENTERED = "MOTLEY_SOAK_ROOM"
_DISK_SIZE = 320 * 2**20
ENTER = ("unshare", "--map-root-user", "--mount")


def enter(arguments: Sequence[str]) -> None:
    """Start this program again in namespaces of its own; return when there, or it cannot be."""
    if is_entered() or not is_possible():
        return
    program = [sys.executable, "-m", "tests.soak", *arguments]
    os.execvpe(ENTER[0], [*ENTER, *program], {**os.environ, _ENTERED: "1"})


def is_possible() -> bool:
    """Whether the kernel lets this user mount in namespaces of its own."""
    try_out = f"mount -t tmpfs -o size={_DISK_SIZE} soak /dev/shm"
    if shutil.which(ENTER[0]) is None:
        return False
    return subprocess.run([*ENTER, "sh", "-c", try_out], capture_output=True).returncode == 0


def is_entered() -> bool:
    """Whether this process may mount."""
    return _ENTERED in os.environ


def mount_small_disk(folder: Path) -> None:
    """Make a folder a disk that `launch` still takes, and /dev/shm one of this run alone."""
    for path in (folder, Path("/dev/shm")):
        size = f"size={_DISK_SIZE},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "soak", path], check=True)


def unmount(folder: Path) -> None:
    """Take the small disk away again."""
    subprocess.run(["umount", folder], check=True)
