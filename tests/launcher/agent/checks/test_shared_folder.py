"""The share is tried for real: folders, and a file system that never answers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from launcher.agent.checks import shared_folder as share_checks
from launcher.hosts.local import LocalConnection

SILENT = "needs root and /dev/fuse to mount a file system that hangs"


def share(folder: Path) -> Path:
    for part in share_checks.PARTS:
        (folder / part).mkdir(parents=True)
    return folder


def test_a_share_that_works_says_where_it_is_and_how_fast(tmp_path: Path) -> None:
    found = share_checks.check_share(str(share(tmp_path / "share")), 60)
    assert found.status in ("ok", "warn")
    assert "folders of this host" in found.detail
    assert "GiB free" in found.detail
    assert [list(folder.iterdir()) for folder in (tmp_path / "share").iterdir()] == [[], []]


def test_the_agent_can_be_asked(tmp_path: Path) -> None:
    answer = LocalConnection().call("share", {"path": str(share(tmp_path / "share"))})
    assert str(tmp_path) in answer["detail"]


def test_a_share_without_its_folders_is_refused(tmp_path: Path) -> None:
    found = share_checks.check_share(str(tmp_path), 60)
    assert found.status == "fail"
    assert "neither logits nor checkpoints" in found.detail
    assert "--tags share" in found.remedy


def test_a_mount_point_without_a_mount_is_named(tmp_path: Path) -> None:
    folder = share(tmp_path / "share")
    (folder / "checkpoints").chmod(0o555)
    if os.getuid() == 0:  # root may write anywhere: say what another user would have found
        trials = [{"path": str(folder / "checkpoints"), "error": "permission denied"}]
        found = share_checks.judge_trials(str(folder), trials)
    else:
        found = share_checks.check_share(str(folder), 60)
    assert found.status == "fail"
    assert found.detail.endswith("checkpoints: permission denied, and nothing is mounted there")


def test_a_slow_share_is_said() -> None:
    trial = {"path": "/srv/x/logits", "seconds": 2.5, "free": 5 << 30}
    found = share_checks.judge_trials("/srv/x", [trial])
    assert found.status == "warn"
    assert "2500 ms, 5.0 GiB free" in found.detail


@contextlib.contextmanager
def silent_mount(folder: Path) -> Generator[None]:
    """Mount a FUSE file system that greets the kernel, takes every request and answers none.

    Whoever waits for a request that was taken can no longer be killed; before, it can.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0,allow_other"
    arguments = (b"10.0.0.1:/share", os.fsencode(folder), b"fuse.nfs4", 0, options.encode())
    if libc.mount(*arguments) != 0:
        os.close(device)
        raise OSError(ctypes.get_errno(), "mount")
    try:
        greeting = os.read(device, 1 << 16)
        unique = struct.unpack_from("<IIQ", greeting)[2]
        welcome = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0, 0)
        os.write(device, struct.pack("<IiQ", 16 + len(welcome), 0, unique) + welcome)
        over = threading.Event()

        def take() -> None:
            while not over.is_set():
                if select.select([device], [], [], 0.05)[0]:
                    os.read(device, 1 << 20)

        taking = threading.Thread(target=take)
        taking.start()
        try:
            yield
        finally:
            over.set()
            taking.join()
    finally:
        libc.umount2(os.fsencode(folder), 2)  # MNT_DETACH
        os.close(device)  # ends every request with an error


def test_a_server_that_is_gone_costs_the_deadline_and_no_more(tmp_path: Path) -> None:
    if os.getuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(SILENT)
    folder = share(tmp_path / "share")
    asked = threading.Event()
    findings: list[share_checks.Finding] = []

    def ask() -> None:
        findings.append(share_checks.check_share(str(folder), 3))
        asked.set()

    with silent_mount(folder / "checkpoints"):
        threading.Thread(target=ask, daemon=True).start()
        assert asked.wait(60), "the check hangs with the share"
        left = list(share_checks._LEFT)
        assert [child.poll() for child in left] == [None], "the child still sleeps"
    for child in left:  # the file system let go: nothing stays behind
        child.wait(30)
    assert findings[0].status == "fail"
    assert findings[0].detail == f"{folder}: no answer within 3 s (10.0.0.1:/share)"
    assert "by itself" in findings[0].remedy


def test_the_child_needs_only_the_standard_library() -> None:
    code = "import sys, launcher.agent.checks.shared_folder; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    heavy = {"ansible", "cryptography", "numpy", "psutil", "pydantic", "rich"}
    assert heavy.isdisjoint(done.stdout.split())
