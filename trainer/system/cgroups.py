"""Limits of main memory and processor time that the kernel enforces on this process's groups.

Containers, Slurm and Kubernetes set them: versions 1 and 2 of control groups, each at any level of
the tree (cgroups(7), and the kernel's admin-guide/cgroup-v2 and cgroup-v1/memory). A processor set
needs no care here: the affinity of a process (`os.sched_getaffinity`) is within it. Standard
library only: it runs on every host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trainer.system.kernel_files import read_content, read_number

_ROOT = Path("/")
_NONE = 1 << 60
"""Bytes from which version 1's number, the largest multiple of a page, means no limit."""


def memory_limit(total: int, root: Path = _ROOT) -> int:
    """Return the bytes that this process may have of a machine's main memory.

    Args:
        total: those of the machine.
        root: the folder that contains `proc` and `sys`.
    """
    return min([total, *(limit for _, limit in _memory_limits(root))])


def free_memory(available: int, root: Path = _ROOT) -> int:
    """Return the bytes that this process can still take of a machine's free memory.

    A group's own cache of files that are not in active use counts as free.

    Args:
        available: those that are free on the machine.
        root: as above.
    """
    free = [available]
    for folder, limit in _memory_limits(root):
        used = (
            read_number(folder / "memory.current")
            or read_number(folder / "memory.usage_in_bytes")
            or 0
        )
        statistics = dict(
            line.split() for line in read_content(folder / "memory.stat").splitlines()
        )
        cached = statistics.get("total_inactive_file") or statistics.get("inactive_file", "0")
        free.append(max(0, limit - max(0, used - int(cached))))
    return min(free)


def count_processors(count: int, root: Path = _ROOT) -> int:
    """Return how many processors' time this process may use, rounded up.

    Args:
        count: those in its affinity.
        root: as above.
    """
    found = [float(count)]
    for folder in _find_groups("cpu", root):
        quota, _, period = read_content(folder / "cpu.max").partition(" ")
        quota = quota or read_content(folder / "cpu.cfs_quota_us")
        period = period or read_content(folder / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return max(1, math.ceil(min(found)))


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the groups that have limits, and these in bytes; `memory.high` slows a process down."""
    for folder in _find_groups("memory", root):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [limit for name in names if (limit := read_number(folder / name)) is not None]
        if limits and min(limits) < _NONE:
            yield folder, min(limits)


def _find_groups(controller: Literal["cpu", "memory"], root: Path) -> Iterator[Path]:
    """Yield the folders of this process's group and of those that contain it, in both versions."""
    for line in read_content(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            for mounted, point in _read_mounts(controller if controllers else "", root):
                # A container may see another part of the tree, or its path from outside.
                inside = "" if mounted == "/" else mounted
                within = path.removeprefix(inside) if path.startswith(inside) else ""
                names = [name for name in within.split("/") if name]
                if ".." in names:
                    names = []
                for depth in range(len(names), -1, -1):
                    yield root.joinpath(point.lstrip("/"), *names[:depth])


def _read_mounts(controller: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the mounted folder and the mount point of a controller's tree; version 2's for none."""
    for line in read_content(root / "proc/self/mountinfo").splitlines():
        source, _, kind = line.partition(" - ")
        filesystem, _, options = kind.split(" ", 2)
        found = controller in options.split(",") if filesystem == "cgroup" else not controller
        if filesystem in ("cgroup", "cgroup2") and found:
            mounted, point = (_unescape_octal(word) for word in source.split(" ")[3:5])
            yield mounted, point


def _unescape_octal(word: str) -> str:
    return re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), word)
