"""Processes of this machine, named so that a reused pid is never mistaken for them.

Standard library only: the session supervisor needs it, also on hosts without the launcher's extras.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")

RUN_VARIABLE = "MOTLEY_RUN_ID"
"""Set for everything that a run starts; a process with it belongs to the run."""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process: its pid, the kernel's start time (clock ticks after boot) and the boot."""

    pid: int
    start: int
    boot: str


def identify_process(pid: int) -> ProcessIdentity | None:
    """Return the identity of a living process; None when there is none or it is a zombie."""
    stat = _read_stat(pid)
    if stat is None or stat[0] in "ZX":
        return None
    return ProcessIdentity(pid, stat[1], boot_id())


def is_alive(process: ProcessIdentity) -> bool:
    """Whether this very process still runs, not just one with its number."""
    return identify_process(process.pid) == process


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Signal this very process; False when it is gone.

    The pidfd pins the process before its identity is checked, so no other process is ever hit.
    """
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def send_group_signal(leader: ProcessIdentity, number: int) -> bool:
    """Signal the process group that `leader` leads; False when the leader is gone."""
    if not is_alive(leader):
        return False
    try:
        if os.getpgid(leader.pid) != leader.pid:
            return False
        os.killpg(leader.pid, number)
    except ProcessLookupError:
        return False
    return True


def find_run(run_id: str) -> list[ProcessIdentity]:
    """Return every living process of this user (of anyone, for root) that carries the run's id.

    Descendants inherit the variable, so also what a worker left behind is found, wherever it
    was reparented to.
    """
    entry = f"{RUN_VARIABLE}={run_id}".encode()
    return list(_find_processes(entry))


def describe_process(process: ProcessIdentity) -> str:
    """Return the command name and pid for people."""
    try:
        name = (PROC / str(process.pid) / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        name = "process"
    return f"{name} (pid {process.pid})"


@cache
def boot_id() -> str:
    """Return the kernel's id of this boot: start times of another boot mean nothing."""
    return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _find_processes(entry: bytes) -> Iterator[ProcessIdentity]:
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # gone, or another user's
            continue
        if entry in environment.split(b"\0"):
            process = identify_process(int(folder.name))
            if process is not None:
                yield process


def _read_stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time; the name in brackets may hold spaces and brackets."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
