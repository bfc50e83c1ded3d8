"""One writer a folder: real processes that race, are killed, stopped, and come back too late."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil
import pytest

from tests.forked import CONTEXT
from tests.trainer.crash_at_every_step import CountingDisk
from tests.trainer.lease_holder import become
from tests.trainer.tiny_run import tiny_config, tiny_layout, tiny_progress, tiny_state
from tests.waiting import PATIENCE, wait_for
from trainer.checkpoint.reader import step_folders
from trainer.checkpoint.store import CheckpointStore
from trainer.system.errors import InUseError
from trainer.system.storage import lease, lease_folder
from trainer.system.storage.atomic_folder import verify_folder
from trainer.system.storage.lease import Lease, acquire_lease, refuse_if_held
from trainer.system.storage.lease_folder import lease_path, write_heartbeat

AGES = 3600.0
"""A silence that no test lasts: what needs it to be over hangs."""


class Holder:
    """A process that asked for a lease; see `lease_holder`."""

    def __init__(self, folder: Path, silence: float = AGES, identity: str = "") -> None:
        arguments = [str(folder), str(silence), *([identity] if identity else [])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.lease_holder", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """Return its next line."""
        assert self.process.stdout
        return self.process.stdout.readline().rstrip("\n")

    def is_told(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self) -> int:
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[type[Holder]]:
    started: list[Holder] = []

    class Started(Holder):
        def __init__(self, *arguments, **options) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    yield Started
    for holder in started:
        holder.process.kill()
        holder.process.communicate()


@pytest.mark.cluster
def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    folders = [tmp_path / f"{attempt}" for attempt in range(10)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.trainer.lease_race", *folders],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    races = [json.loads(line) for line in done.stdout.splitlines()]
    for folder, race in zip(folders, races, strict=True):
        (winner,), said = race["winners"], race["said"]
        assert len(said) == 8
        assert said.count("held") == 1, said
        assert sum(f"in use by run run, pid {winner} on host" in line for line in said) == 7, said
        assert [path.name for path in folder.iterdir()] == [".lease-000001"]


@pytest.mark.parametrize("at", ["write_heartbeat", "lease_path"])
def test_one_that_is_killed_while_it_asks_leaves_nothing_for_ever(tmp_path: Path, at: str) -> None:
    code = f"""
import os, signal
from pathlib import Path
from trainer.system.storage import lease, lease_folder
lease_folder.{at} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
lease.acquire_lease(Path({str(tmp_path)!r}), "killed")
"""
    died = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE, check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    acquire_lease(tmp_path, "mine").release()
    assert [path.name for path in tmp_path.iterdir()] == [".lease-000001"]


def test_the_refusal_names_the_holder_and_what_to_do(tmp_path: Path, start: type[Holder]) -> None:
    holder = start(tmp_path)
    assert holder.says() == "held"
    with pytest.raises(InUseError) as refused:
        acquire_lease(tmp_path, "mine")
    line = str(refused.value)
    assert f"in use by run run-of-{holder.process.pid}, pid {holder.process.pid} on host" in line
    assert "since 20" in line
    assert (
        f"stop that one first (`launch cluster down`, or kill {holder.process.pid} there)" in line
    )
    assert "\n" not in line
    assert refused.value.exit_code == 4


def test_a_look_finds_the_holder_and_leaves_nothing(tmp_path: Path, start: type[Holder]) -> None:
    """Who lives on another host is found by listening alone, which is left to `acquire_lease`."""
    for folder in (tmp_path / "none", tmp_path):
        refuse_if_held(folder)
    assert not list(tmp_path.iterdir())
    holder = start(tmp_path)
    assert holder.says() == "held"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InUseError, match=f"pid {holder.process.pid} on host"):
        refuse_if_held(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    holder.ends()
    refuse_if_held(tmp_path)
    elsewhere = start(tmp_path, identity="another host")
    assert elsewhere.says() == "held"
    refuse_if_held(tmp_path)


def test_one_that_was_given_back_is_free_for_any_host(tmp_path: Path, start: type[Holder]) -> None:
    elsewhere = start(tmp_path, identity="another host")
    assert elsewhere.says() == "held"
    assert elsewhere.ends() == 0
    acquire_lease(tmp_path, "mine", silence=AGES).release()


def test_without_locks_signs_of_life_decide_on_the_same_host_too(
    tmp_path: Path, start: type[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    holder = start(tmp_path, silence=1.0)
    assert holder.says() == "held"
    with pytest.raises(InUseError):
        acquire_lease(tmp_path, "mine", silence=AGES)


def test_a_folder_that_is_away_ends_nothing(tmp_path: Path) -> None:
    """An unmounted share looks empty: that is no successor."""
    lost: list[str] = []
    folder, away = tmp_path / "share", tmp_path / "away"
    held = acquire_lease(folder, "mine", on_lost=lost.append, silence=0.0001)
    folder.rename(away)
    held.check_held()
    folder.mkdir()
    held.check_held()
    folder.rmdir()
    away.rename(folder)
    held.check_held()
    assert not lost
    held.release()


def test_only_listening_counts_as_silence(
    tmp_path: Path, start: type[Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was suspended while it listened has heard nothing, and concludes nothing."""
    elsewhere = start(tmp_path, silence=1.0, identity="another host")
    assert elsewhere.says() == "held"
    jumping = iter(range(0, 10**9, 10**6))
    monkeypatch.setattr(lease, "_boot_clock", lambda: float(next(jumping)))
    with pytest.raises(InUseError):
        acquire_lease(tmp_path, "mine", silence=60.0)


@pytest.mark.parametrize("what", ["beats meanwhile", "is away meanwhile", "beats afterwards"])
def test_one_that_may_live_in_the_second_folder_is_listened_to(
    tmp_path: Path, start: type[Holder], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A share that is away shows no silence: its holder could not have written either."""
    output, checkpoints = tmp_path / "output", tmp_path / "checkpoints"
    for folder in (output, checkpoints):
        holder = start(folder, silence=0.6, identity="another host")
        assert holder.says() == "held"
        holder.is_told(signal.SIGSTOP)
    beaten = lease_path(checkpoints, 1)
    look, looks = lease_folder.newest_lease, iter([1, 2])

    def newest_lease(folder: Path) -> int | None:
        if folder == checkpoints and next(looks, 0) == 2:
            if what == "beats meanwhile":
                write_heartbeat(beaten, 77)
            elif what == "is away meanwhile":
                raise OSError(errno.EIO, "the share does not answer")
        return look(folder)

    monkeypatch.setattr(lease_folder, "newest_lease", newest_lease)
    mine = acquire_lease(output, "mine", silence=0.3, beside=checkpoints)
    if what == "beats afterwards":
        write_heartbeat(beaten, 77)
    holder.is_told(signal.SIGCONT)
    with pytest.raises(InUseError, match=f"pid {holder.process.pid} on host"):
        acquire_lease(checkpoints, "mine", silence=AGES, after=mine)
    mine.release()
    assert holder.ends() == 0, "undisturbed"


def open_store(folder: Path, held: Lease, disk: CountingDisk | None = None) -> CheckpointStore:
    config = tiny_config(keep_last=1)
    return CheckpointStore(folder, tiny_layout(), config, Path("base"), disk=disk, lease=held)


def save(store: CheckpointStore, step: int, generation: int) -> None:
    progress = replace(tiny_progress(step), generation=generation)
    store.save(tiny_state(step).take_snapshot(), progress, metric=float(step))


def save_until(folder: Path, k: int) -> None:
    """Save as a process of another host, and stop before the k-th operation.

    It gives no sign of life, nor looks for one: the fence alone is on trial.
    """
    become("another host")

    def stop(count: int, name: str, arguments: tuple) -> None:
        if count == k:
            os.kill(os.getpid(), signal.SIGSTOP)

    disk = CountingDisk()
    store = open_store(folder, acquire_lease(folder, "run-a", silence=AGES), disk)
    disk.count_anew(stop)
    try:
        save(store, 2, generation=2)
    except InUseError as error:
        sys.exit(error.exit_code)


def stopped_at(folder: Path, k: int) -> ForkServerProcess:
    """Start `save_until`, and return it stopped, or ended where it has no k-th operation.

    By the fork server: a fork of pytest's own process, which has threads, may hang in their locks.
    """
    child = CONTEXT.Process(target=save_until, args=(folder, k))
    child.start()
    process = psutil.Process(child.pid)
    wait_for(
        lambda: child.exitcode is not None or process.status() == psutil.STATUS_STOPPED,
        f"stopped before operation {k}",
    )
    return child


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_stopped_at_any_operation_it_publishes_nothing_after_a_takeover(
    tmp_path: Path, again: bool
) -> None:
    """What the successor published stays as it is, whenever its predecessor wakes up."""
    k = 0
    while True:
        k += 1
        folder = tmp_path / f"{k}"
        first = acquire_lease(folder, "run-a")
        save(open_store(folder, first), 2 if again else 1, generation=1)
        first.release()
        child = stopped_at(folder, k)
        if child.exitcode is not None:
            break
        try:
            held = acquire_lease(folder, "run-a", silence=0.03)
            store = open_store(folder, held)
            restored = store.restore()
            assert restored is not None, k
            assert restored.progress.step in ((2,) if again else (1, 2)), k
            save(store, 2, generation=3)  # as a successor does that computes the same step again
            save(store, 4, generation=3)
        finally:
            assert child.pid
            os.kill(child.pid, signal.SIGCONT)
            child.join(PATIENCE)
        assert child.exitcode in (0, InUseError.exit_code), k
        assert (folder / "latest").readlink().name == "step-000004", k
        assert (folder / "best").readlink().name == "step-000004", k
        kept = step_folders(folder)
        assert folder / "step-000004" in kept, k
        for path in kept:
            verify_folder(path)
        hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert hidden == [".lease-000003"], (k, hidden)
        newest = store.restore()
        assert newest is not None
        assert newest.progress.generation == 3, k
        held.release()
        shutil.rmtree(folder)
    assert child.exitcode == 0, "no process had taken over"
    assert k > 25, "every write, sync and rename is a place to be stopped"
