"""Supervisors on a full disk: their process goes on, and they say so as soon as they can."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from launcher.session.log_index import LogMarks, find_offset
from launcher.session.processes import find_run, send_signal
from launcher.session.spec import RestartPolicy, SessionSpec
from tests.waiting import wait_for

pytestmark = pytest.mark.cluster

RUN_ID = f"full-disk-{secrets.token_hex(4)}"  # tests of other checkouts may run beside
QUICK = RestartPolicy(first_delay=0.01, max_delay=0.05)
CHILD = """
import os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1])
number = len(list(place.glob("life-*"))) + 1
(place / f"life-{number}").mkdir()
(place / f"pid-{os.getpid()}").mkdir()
while not (place / "done").exists():
    time.sleep(0.01)
"""


class Disk(Protocol):
    """A file system that can be full."""

    folder: Path

    def fill(self, supervisor: int) -> None: ...

    def free(self, supervisor: int) -> None: ...


class SmallDisk:
    """A real one of 64 KiB and few files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, supervisor: int) -> None:
        """Take the last byte, and the last name."""
        for number in range(100):
            path = self.folder / f"junk-{number}"
            with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
                while stream.write(b"x" * 512):
                    pass
        with pytest.raises(OSError, match="No space left on device"):
            (self.folder / "junk-more").touch()

    def free(self, supervisor: int) -> None:
        for path in self.folder.glob("junk-*"):
            path.unlink()


class LimitedDisk:
    """A limit of the kernel under which the supervisor cannot write a byte to any file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, supervisor: int) -> None:
        hard = resource.prlimit(supervisor, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (0, hard))

    def free(self, supervisor: int) -> None:
        hard = resource.prlimit(supervisor, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(supervisor, resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(params=["a small disk", "a limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "a limit":
        yield LimitedDisk(folder)
        return
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a tmpfs")
    options = "size=64k,nr_inodes=20"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        for process in find_run(RUN_ID):
            send_signal(process, signal.SIGKILL)
        wait_for(lambda: not find_run(RUN_ID), "everything to be gone")
        subprocess.run(["umount", folder], check=True)


class Kept:
    """A supervisor on a disk, and its child, which notes its lives elsewhere."""

    def __init__(self, disk: Disk, elsewhere: Path) -> None:
        self.elsewhere = elsewhere
        elsewhere.mkdir()
        self.folder = disk.folder / "worker-0"
        (self.folder / "tls").mkdir(parents=True)
        (self.folder / "tls" / "key.pem").write_text("secret")
        spec = SessionSpec(
            name="worker-0",
            run_id=RUN_ID,
            argv=(sys.executable, "-P", "-c", CHILD, str(elsewhere)),
            env={"MOTLEY_RUN_ID": RUN_ID},
            folder=str(self.folder),
            restart=QUICK,
        )
        path = self.folder / "spec.json"
        path.write_bytes(spec.to_json())
        with (self.folder / "supervisor.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "launcher.session", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def lives(self) -> int:
        return len(list(self.elsewhere.glob("life-*")))

    @property
    def state(self) -> dict[str, Any]:
        text = (self.folder / "state.json").read_bytes()
        return json.loads(text) if text else {}

    def kill_child(self) -> None:
        """Kill the present child; its supervisor gets to know of it at once."""
        wait_for(lambda: list(self.elsewhere.glob("pid-*")), "the child's pid")  # after its life
        (pid,) = [int(path.name.removeprefix("pid-")) for path in self.elsewhere.glob("pid-*")]
        (self.elsewhere / f"pid-{pid}").rmdir()
        os.kill(pid, signal.SIGKILL)

    def wake(self) -> None:
        """It looks every few seconds by itself."""
        self.supervisor.send_signal(signal.SIGCHLD)


def test_a_supervisor_outlives_a_full_disk(disk: Disk, tmp_path: Path) -> None:
    kept = Kept(disk, tmp_path / "elsewhere")
    try:
        wait_for(lambda: kept.lives == 1 and kept.state.get("state") == "running", "the start")
        disk.fill(kept.supervisor.pid)
        for life in (2, 3):
            kept.kill_child()
            wait_for(lambda life=life: kept.lives == life, f"life {life}")
        assert kept.supervisor.poll() is None
        assert kept.state["attempt"] == 1  # what could be written last
        disk.free(kept.supervisor.pid)
        kept.wake()
        wait_for(lambda: kept.state.get("attempt") == 3, "the state of attempt 3")
        assert (kept.state["state"], kept.state["failures"]) == ("running", 2)

        key = kept.folder / "tls" / "key.pem"
        os.link(key, disk.folder / "key")  # or its bytes are free for the state once it is deleted
        disk.fill(kept.supervisor.pid)
        (tmp_path / "elsewhere" / "done").mkdir()
        wait_for(lambda: not key.exists(), "the end")
        kept.wake()
        assert kept.supervisor.poll() is None
        disk.free(kept.supervisor.pid)
        kept.wake()
        assert kept.supervisor.wait(30) == 0
        assert (kept.state["state"], kept.state["exit_code"]) == ("exited", 0)
    finally:
        kept.supervisor.kill()
        kept.supervisor.wait()


def test_a_supervisor_that_is_to_stop_does_not_wait_for_the_disk(
    disk: Disk, tmp_path: Path
) -> None:
    kept = Kept(disk, tmp_path / "elsewhere")
    try:
        wait_for(lambda: kept.lives == 1 and kept.state.get("state") == "running", "the start")
        disk.fill(kept.supervisor.pid)
        kept.supervisor.send_signal(signal.SIGTERM)
        assert kept.supervisor.wait(30) == 0
        assert not (kept.folder / "tls" / "key.pem").exists()
        assert find_run(RUN_ID) == []
    finally:
        kept.supervisor.kill()
        kept.supervisor.wait()


def test_a_log_that_cannot_be_opened_is_said_and_ends_nothing(tmp_path: Path) -> None:
    kept = Kept(LimitedDisk(tmp_path), tmp_path / "elsewhere")
    try:
        wait_for(lambda: kept.lives == 1 and kept.state.get("state") == "running", "the start")
        (kept.folder / "attempt-2.log").mkdir()  # open() refuses it, as it does a new file there
        kept.kill_child()
        wait_for(lambda: kept.lives == 2 and kept.state.get("attempt") == 2, "the second life")
        assert kept.state["message"] == "attempt-2.log cannot be written: Is a directory"
        kept.kill_child()
        wait_for(lambda: kept.state.get("attempt") == 3, "the third life")
        assert kept.state["message"] is None
    finally:
        kept.supervisor.kill()
        kept.supervisor.wait()


@pytest.mark.parametrize("disk", ["a small disk"], indirect=True)
def test_a_torn_mark_takes_no_other_with_it(disk: Disk) -> None:
    log = disk.folder / "attempt-1.log"
    marks = LogMarks(log)
    times = disk.folder / "attempt-1.times"
    log.write_bytes(b"x")
    marks.take_mark()
    os.truncate(times, 4090)  # 6 bytes are left in its page, and no other page
    disk.fill(0)
    marks.take_mark()
    disk.free(0)
    assert times.stat().st_size == 4096
    os.truncate(log, 77)
    marks.take_mark()
    last = times.read_bytes().rpartition(b"\0")[2].splitlines()
    assert [len(line.split()) for line in last] == [1, 2]
    assert find_offset(b"\n".join(last), 9e9) == 77
