"""Sweeping up after dead writers, and never after living ones of another host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.system.storage import removal
from trainer.system.storage.atomic_folder import Disk, FolderWriter, hidden_name, verify_folder
from trainer.system.storage.removal import FORGOTTEN, sweep_leftovers

WRITE_ELSEWHERE = """
import sys
from pathlib import Path
from tests.trainer.lease_holder import become
from trainer.system.storage.atomic_folder import Disk, FolderWriter
become("another host")
writer = FolderWriter(Disk(), Path(sys.argv[1]), "shard-00001")
writer.write_file("half", [b"content"])
print("half", flush=True)
sys.stdin.readline()
writer.write_file("rest", [b"content"])
writer.publish()
"""


def backdate(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_a_living_writer_of_another_host_is_spared(tmp_path: Path) -> None:
    """Over NFS its lock is not seen here."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITE_ELSEWHERE, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"half\n"
        sweep_leftovers(Disk(), tmp_path)
        sweep_leftovers(Disk(), tmp_path, "shard-00001")
        writer.communicate(b"\n", timeout=60)
    assert writer.returncode == 0
    verify_folder(tmp_path / "shard-00001")


@pytest.mark.parametrize("kind", ["tmp", "old"])
def test_what_another_host_left_goes_when_it_was_not_touched_for_long(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-000001").mkdir()
    monkeypatch.setattr("trainer.system.storage.atomic_folder.host_identity", lambda: "anothers")
    left = tmp_path / hidden_name(kind, "step-000001")
    monkeypatch.undo()
    left.mkdir()
    (left / "file").write_bytes(b"half")
    backdate(left, FORGOTTEN - 60)
    sweep_leftovers(Disk(), tmp_path)
    assert left.exists()
    backdate(left, FORGOTTEN + 60)
    os.utime(left / "file")  # the last file still grows
    sweep_leftovers(Disk(), tmp_path)
    assert left.exists()
    backdate(left, FORGOTTEN + 60)
    sweep_leftovers(Disk(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_the_age_is_by_the_clock_of_the_file_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host whose own clock is a day ahead removes nothing of others."""
    left = tmp_path / ".tmp-step-000001-anothers.1234"
    left.mkdir()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    sweep_leftovers(Disk(), tmp_path)
    assert left.exists()


def test_what_is_of_an_unknown_host_is_judged_by_its_age(tmp_path: Path) -> None:
    left = tmp_path / ".tmp-step-000001-12345678"
    left.mkdir()
    sweep_leftovers(Disk(), tmp_path)
    assert left.exists()
    backdate(left, FORGOTTEN + 60)
    sweep_leftovers(Disk(), tmp_path)
    assert not left.exists()


def test_what_this_host_left_goes_at_once(tmp_path: Path) -> None:
    living = FolderWriter(Disk(), tmp_path, "step-000001")
    (tmp_path / hidden_name("tmp", "step-000002")).mkdir()
    sweep_leftovers(Disk(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [living.temporary.name]
    living.abandon()


def test_a_folder_that_vanishes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".tmp-step-000001-anothers.1234"
    left.mkdir()
    scan = removal._last_touched

    def vanish(folder: Path) -> float:
        folder.rmdir()
        return scan(folder)

    monkeypatch.setattr(removal, "_last_touched", vanish)
    sweep_leftovers(Disk(), tmp_path)
    assert list(tmp_path.iterdir()) == []
