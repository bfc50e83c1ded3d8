"""A child that dies with its parent, and process groups of which nothing survives.

Also for the launcher's supervisors: standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

PARENT_VARIABLE = "MOTLEY_PARENT"
"""Tells a program its supervisor's pid and a socket to it, as `PID:DESCRIPTOR`; see `prefork`."""
SAVING_VARIABLE = "MOTLEY_SAVING"
"""Tells a process the file to keep while it saves: its supervisor then delays SIGKILL."""
PROGRESS_VARIABLE = "MOTLEY_PROGRESS"
"""Tells a process the file for its progress before training; its supervisor passes it on."""
FALLBACK_VARIABLE = "MOTLEY_GPU_FALLBACK"
"""Lets a process use another device than requested: set for a restarted one, whose device may have
been lost, and by the launcher for a device that it chose itself."""
NO_GPU = "no GPU was found"
"""Begins the reason for the CPU on a machine without a GPU: no device was lost or passed over."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here: not between fork and exec. Only Linux has it.
_prctl: Any = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, and end it if that is no longer `parent`."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # killed before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Have orphans of children come to this process, which can then reap and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_child(
    argv: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    output: BinaryIO | None,
    *,
    keep: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of a new group; it is killed when this process dies.

    Args:
        output: of its stdout and stderr; None: this process's own.
        keep: a descriptor that it inherits under the same number.

    Raises:
        OSError: it cannot be started.
    """
    parent = os.getpid()

    def before_exec() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(parent)

    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=folder,
        env=environment,
        process_group=0,
        pass_fds=() if keep is None else (keep,),
        preexec_fn=before_exec,
    )


def reap_children() -> dict[int, int]:
    """Collect every ended child; return how each ended, by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            found, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if found == 0:
            return ended
        ended[found] = os.waitstatus_to_exitcode(status)


def signal_group(group: int, number: int) -> None:
    """Signal what is left of a group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def kill_orphans(spare: int | None = None) -> dict[int, int]:
    """End what children left behind outside of their groups, once it has come to this process.

    Args:
        spare: a child that keeps running.

    Returns:
        How each ended, by pid.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    ended: dict[int, int] = {}
    for _ in range(100):
        left = children.read_text(encoding="ascii").split() if children.exists() else []
        left = [int(pid) for pid in left if int(pid) != spare]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.1)
        ended |= reap_children()
    return ended
