"""What a cut, a full disk or a dying disk does to a save, at each of its operations."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.crash_at_every_step import OPERATIONS, CountingDisk, open_store, save
from tests.trainer.tiny_run import tiny_state
from trainer.system.errors import StorageError
from trainer.system.storage.atomic_folder import (
    Disk,
    FolderWriter,
    hidden_name,
    prepare_folder,
    verify_folder,
)
from trainer.system.storage.removal import pin_folder, remove_folder, sweep_leftovers


@pytest.mark.long
def test_killed_before_every_operation_the_previous_checkpoint_loads(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.trainer.crash_at_every_step", tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for again in (False, True):
        series = [result for result in results if result["again"] is again]
        assert len(series) > 25, "every write, sync and rename is a place to die"
        assert [result["exit_code"] for result in series] == [-9] * (len(series) - 1) + [0]
        for result in series:
            assert result["intact"], result
            assert result["step"] == 2 or (result["step"] == 1 and not again), result
            assert result["best"] is not None, result
            assert result["hidden"] == [], result
            assert result["next"] == 3, result
        steps = [result["step"] for result in series]
        assert steps == sorted(steps), "once the new one is visible it stays"
        assert steps[-1] == 2


@pytest.mark.parametrize(("code", "before"), [(errno.EIO, 1), (errno.ENOSPC, 1), (errno.EIO, 2)])
def test_an_error_at_every_operation_keeps_the_old_one(tmp_path: Path, code: int, before: int):
    counted = CountingDisk(lambda *_: None)
    save(open_store(tmp_path / "whole"), before, generation=2)
    save(open_store(tmp_path / "whole", counted), 2)
    assert counted.count > 25
    for k in range(1, counted.count + 1):
        folder = tmp_path / f"{k}"
        save(open_store(folder), before, generation=2)

        def fail(count: int, name: str, arguments: tuple, at: int = k) -> None:
            if count == at:
                raise OSError(code, f"{os.strerror(code)} ({name})")

        store = open_store(folder, CountingDisk(fail))
        failed = None
        try:
            save(store, 2)
        except StorageError as error:
            failed = str(error)
            assert os.strerror(code) in failed
            assert "\n" not in failed
        restored = store.restore()
        assert restored is not None
        assert (
            restored.state.compute_digest() == tiny_state(restored.progress.step).compute_digest()
        )
        if failed:
            assert not list(folder.glob(".tmp-*")), "it gave its space back"
        else:  # it was only about what is no longer needed
            assert (restored.progress.step, restored.progress.generation) == (2, 3)
        save(store, 3)
        assert store.latest_checkpoint() == folder / "step-000003"
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_nothing_is_named_before_it_is_durable(tmp_path: Path):
    """The order that a power cut needs: content, manifest, folder, name, pointer."""
    trace: list[tuple[str, str]] = []

    def note(count: int, operation: str, arguments: tuple) -> None:
        first = arguments[0]
        if isinstance(first, int):
            first = Path(f"/proc/self/fd/{first}").readlink()
        if operation == "rename":
            first = arguments[1]
        if operation == "link":
            first = arguments[1]
        trace.append((operation, Path(first).name.split("-")[0].removeprefix(".")))

    save(open_store(tmp_path / "store", CountingDisk(note)), 1)
    created = [name for operation, name in trace if operation == "create"]
    assert created[-1] == "manifest.json"

    def last(operation: str, name: str) -> int:
        return max(i for i, entry in enumerate(trace) if entry == (operation, name))

    def first(operation: str, name: str) -> int:
        return trace.index((operation, name))

    for name in created:
        assert last("write", name) < first("sync", name)
    for name in created[:-1]:
        assert first("sync", name) < first("create", "manifest.json")
    assert first("sync", "manifest.json") < first("sync", "tmp") < first("rename", "step")
    assert first("rename", "step") < first("sync", "store") < first("rename", "latest")
    assert trace.index(("sync", "store"), first("rename", "latest")) > 0


def test_operations_are_all_counted():
    public = {name for name in vars(Disk) if not name.startswith("_")}
    assert public == set(OPERATIONS)


def test_sweep_spares_a_living_writer(tmp_path: Path):
    disk = Disk()
    living = FolderWriter(disk, tmp_path, "step-000001")
    (tmp_path / hidden_name("tmp", "step-000002")).mkdir()
    (tmp_path / ".link-latest-dead").symlink_to("step-000009")
    sweep_leftovers(disk, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [living.temporary.name]
    living.write_file("file", [b"content"])
    verify_folder(living.publish())


def test_sweep_brings_back_what_was_set_aside(tmp_path: Path):
    disk = Disk()
    writer = FolderWriter(disk, tmp_path, "step-000001")
    writer.write_file("file", [b"content"])
    path = writer.publish()
    path.rename(tmp_path / hidden_name("old", "step-000001"))
    sweep_leftovers(disk, tmp_path)
    verify_folder(path)


def test_a_pin_of_another_process_holds(tmp_path: Path):
    writer = FolderWriter(Disk(), tmp_path, "step-000001")
    writer.write_file("file", [b"content"])
    path = writer.publish()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from trainer.system.storage.removal import pin_folder\n"
            "with pin_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()",
            path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        assert not remove_folder(Disk(), path)
        verify_folder(path)
        holder.communicate()
    assert remove_folder(Disk(), path)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path):
    class SlowDisk(Disk):
        def write(self, descriptor: int, data: memoryview) -> int:
            return super().write(descriptor, data[:7])

    writer = FolderWriter(SlowDisk(), tmp_path, "folder")
    writer.write_file("file", [b"0123456789" * 5, b"", memoryview(b"abc")])
    path = writer.publish()
    assert (path / "file").read_bytes() == b"0123456789" * 5 + b"abc"
    verify_folder(path)
    with pin_folder(path) as held:
        assert held == path


def test_a_probe_that_another_process_swept_away_is_no_error(tmp_path: Path, monkeypatch):
    touch = Path.touch

    def touch_and_sweep(path: Path) -> None:
        touch(path)
        sweep_leftovers(Disk(), tmp_path)

    monkeypatch.setattr(Path, "touch", touch_and_sweep)
    prepare_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []
