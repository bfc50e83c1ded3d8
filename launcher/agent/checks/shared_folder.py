"""Whether the share can be used from this host, checked without ever blocking on it.

A process that accesses a file on a share whose server is unreachable may block until the server is
back, and cannot even be killed. So a child accesses it, and a child that misses the deadline is
abandoned. Standard library only: an agent runs this on its host, as the run user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.agent.checks.finding import Finding
from launcher.agent.operation import check, operation

PARTS = ("logits", "checkpoints")
DEADLINE = 4.0
"""Seconds the share has to answer: less than a check may take."""

_SLOW = 1.0
"""Seconds for one small durable file; a slower share is a warning."""
_GIB = 1 << 30
_PROBE = bytes(4096)
_REMEDY = "run: ansible-playbook recipes/gpu-training.yml --tags share"
_NETWORK = ("nfs", "nfs4", "fuse.nfs4", "cifs", "fuse.sshfs", "ceph", "glusterfs")
_IN_MEMORY = (
    [int(sys.path[0].rpartition("/")[2])] if sys.path[0].startswith("/proc/self/fd") else []
)
"""The descriptor of the agent's code where it came along (`agent/archive.py`)."""
_LEFT: list[subprocess.Popen[str]] = []
"""Children that blocked: reaped once the share releases them, never waited for."""


@check("share", deadline=DEADLINE + 1)  # an unreachable file server never answers
def check_share(path: str, deadline: float = DEADLINE) -> Finding:
    """Whether the folders of a share are there, mounted and writable for this user, and how fast.

    Answers within the deadline, whatever the file system does.
    """
    _LEFT[:] = [child for child in _LEFT if child.poll() is None]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.agent.checks.shared_folder", path],
        pass_fds=_IN_MEMORY,
        env={**os.environ, **({"PYTHONPATH": sys.path[0]} if _IN_MEMORY else {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        cwd="/",
    )
    try:
        output, complaint = child.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        child.kill()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        _LEFT.append(child)
        return Finding(
            "fail",
            f"{path}: no answer within {deadline:g} s ({_mount_sources(path) or 'not mounted'})",
            "is its server up and reachable? The mount recovers by itself once the server is back",
        )
    if child.returncode != 0:
        last = (complaint.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        return Finding("fail", f"{path}: {last}", _REMEDY)
    return judge_trials(path, json.loads(output))


@operation("share_source")
def find_share_source(path: str) -> str:
    """Return where a folder is mounted from over the network; empty when it is this host's."""
    place, kind = _last_mount(path)
    return place if kind in _NETWORK else ""


def judge_trials(path: str, trials: Sequence[dict[str, Any]]) -> Finding:
    """Turn the result of a child, one mapping per folder, into a finding."""
    for trial in trials:
        if reason := trial.get("error"):
            where = (
                ""
                if _last_mount(trial["path"])[1] in _NETWORK
                else ", and nothing is mounted there"
            )
            return Finding("fail", f"{trial['path']}: {reason}{where}", _REMEDY)
    if not trials:
        return Finding("fail", f"{path}: has neither {' nor '.join(PARTS)}", _REMEDY)
    slowest = max(float(trial["seconds"]) for trial in trials)
    free = min(int(trial["free"]) for trial in trials)
    place = _mount_sources(path) or "folders of this host"
    detail = (
        f"{path} ({place}), a durable file in {slowest * 1000:.0f} ms, {free / _GIB:.1f} GiB free"
    )
    if slowest > _SLOW:
        return Finding("warn", detail, "checkpoints will be slow: check its server and its link")
    return Finding("ok", detail)


def try_folders(path: Path) -> list[dict[str, Any]]:
    """Write, sync, read and remove a small file in each folder of a share. May hang."""
    return [_try_folder(path / part) for part in PARTS if os.path.lexists(path / part)]


def _try_folder(folder: Path) -> dict[str, Any]:
    probe = folder / f".probe-{secrets.token_hex(4)}"
    began = time.monotonic()
    try:
        descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, _PROBE)
            os.fsync(descriptor)
            if os.pread(descriptor, len(_PROBE), 0) != _PROBE:
                return {"path": str(folder), "error": "the data read differs from the data written"}
        finally:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                probe.unlink()
        space = os.statvfs(folder)
    except OSError as error:
        return {"path": str(folder), "error": (error.strerror or str(error)).lower()}
    seconds = time.monotonic() - began
    return {"path": str(folder), "seconds": seconds, "free": space.f_bavail * space.f_frsize}


def _mount_sources(path: str) -> str:
    """Return where the share's folders are mounted from, as the kernel's table has it."""
    found = {
        source
        for part in PARTS
        for source, kind in [_last_mount(f"{path}/{part}")]
        if kind in _NETWORK
    }
    return ", ".join(sorted(found))


def _last_mount(path: str) -> tuple[str, str]:
    """Return source and type of what is mounted last at a path; never touches the path."""
    found = ("", "")
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        place, _, rest = line.partition(" - ")
        if place.split()[4] == path:
            kind, source = rest.split()[:2]
            found = (source, kind)
    return found


if __name__ == "__main__":
    print(json.dumps(try_folders(Path(sys.argv[1]))))  # noqa: T201 - what the asking process reads
