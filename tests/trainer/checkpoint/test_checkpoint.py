import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainer.tiny_run import (
    make_store,
    save,
    tiny_config,
    tiny_layout,
    tiny_progress,
    tiny_state,
)
from trainer.checkpoint.reader import BEST_EVALUATED, find_checkpoint, read_progress
from trainer.checkpoint.retention import describe_older
from trainer.checkpoint.store import CheckpointStore
from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import Disk, point_link, verify_folder
from trainer.system.storage.removal import pin_folder


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return make_store(tmp_path / "checkpoints")


def test_what_is_saved_comes_back(store: CheckpointStore):
    path = save(store, 120)
    assert path.name == "step-000120"
    assert {entry.name for entry in path.iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "run.json",
        "manifest.json",
    }
    state, progress = store.load(path)
    assert state.compute_digest() == tiny_state(120).compute_digest()
    assert progress == tiny_progress(120)
    assert store.latest_checkpoint() == path
    assert (store.folder / "latest").resolve() == path.resolve()


def test_saving_closes_the_snapshot_and_leaves_the_state_alone(store: CheckpointStore):
    state = tiny_state(1)
    digest = state.compute_digest()
    snapshot = state.take_snapshot()
    store.save(snapshot, tiny_progress(1))
    assert snapshot.is_closed
    assert state.compute_digest() == digest


def test_the_snapshot_is_given_back_before_the_disk_is_waited_for(tmp_path: Path):
    snapshot = tiny_state(1).take_snapshot()
    waited: list[bool] = []

    class Watching(Disk):
        def sync(self, descriptor: int) -> None:
            waited.append(snapshot.is_closed)
            super().sync(descriptor)

    store = CheckpointStore(tmp_path, tiny_layout(), tiny_config(), Path("base"), disk=Watching())
    store.save(snapshot, tiny_progress(1))
    assert waited
    assert all(waited)


def test_latest_looks_at_sizes(store: CheckpointStore):
    save(store, 1)
    newer = save(store, 2)
    (newer / "optimizer.safetensors").write_bytes(b"short")
    assert store.latest_checkpoint() == store.folder / "step-000001"


def test_a_damaged_checkpoint_goes_when_a_newer_one_is_safe(store: CheckpointStore):
    save(store, 1)
    damaged = save(store, 2)
    (damaged / "run.json").unlink()
    save(store, 3)
    assert sorted(path.name for path in store.folder.glob("step-*")) == [
        "step-000001",
        "step-000003",
    ]


def test_keeps_the_last_ones_and_the_best(store: CheckpointStore):
    for step, metric in [(10, 0.5), (20, 0.9), (30, None), (40, 0.7), (50, 0.8)]:
        save(store, step, metric)
    assert [p.name for p in sorted(store.folder.glob("step-*"))] == [
        "step-000020",
        "step-000040",
        "step-000050",
    ]
    best = store.best_checkpoint()
    assert best is not None
    assert best.name == "step-000020"
    assert find_checkpoint(store.folder) == best
    assert find_checkpoint(store.folder.parent) == best
    assert json.loads((best / "run.json").read_bytes())["metric"] == 0.9


def test_a_metric_that_is_nan_is_never_the_best(store: CheckpointStore):
    save(store, 1, float("nan"))
    assert store.best_checkpoint() is None
    save(store, 2, 0.1)
    assert store.best_checkpoint() == store.folder / "step-000002"


def test_the_first_rated_checkpoint_is_linked_as_best(store: CheckpointStore):
    path = save(store, 2, metric=0.1)
    assert (store.folder / "best").readlink().name == "step-000002"
    save(store, 3, metric=0.1)
    assert (store.folder / "best").readlink().name == path.name, "an equal one is not better"


def test_keeps_what_an_eval_runner_found_best(store: CheckpointStore):
    """Its link is not the run's own `best`, and comes second where one is asked for."""
    save(store, 10)
    point_link(Disk(), store.folder, BEST_EVALUATED, "step-000010")
    for step in (20, 30, 40):
        save(store, step)
    assert store.best_checkpoint() is None
    assert find_checkpoint(store.folder.parent) == store.folder / "step-000010"
    save(store, 50, metric=0.1)
    assert find_checkpoint(store.folder.parent) == store.folder / "step-000050"
    point_link(Disk(), store.folder, BEST_EVALUATED, "step-000040")
    save(store, 60)
    assert sorted(path.name for path in store.folder.glob("step-*")) == [
        "step-000040",
        "step-000050",
        "step-000060",
    ]


def test_a_pinned_checkpoint_is_not_pruned(store: CheckpointStore):
    held = save(store, 1)
    with pin_folder(held):
        for step in (2, 3, 4):
            save(store, step)
        verify_folder(held)
    save(store, 5)
    assert not held.exists()
    with pytest.raises(StorageError, match="step-000001"), pin_folder(held):
        pass


def test_saving_the_same_again_is_idempotent(store: CheckpointStore):
    path = save(store, 1)
    inode = path.stat().st_ino
    assert save(store, 1) == path
    assert path.stat().st_ino == inode


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(store: CheckpointStore):
    path = save(store, 1)
    (path / "optimizer.safetensors").write_bytes(b"")
    save(store, 1)
    assert store.load(path)[0].compute_digest() == tiny_state(1).compute_digest()
    assert [p.name for p in store.folder.iterdir() if p.name.startswith(".")] == []


def test_runs_in_one_folder_are_told_apart(store: CheckpointStore):
    for step in (7, 8, 9):
        save(store, step, run_id="run-old")
    assert store.read_owner() == "run-old"
    assert store.restore("run-new") is None
    for step in (1, 2, 3):
        save(store, step, run_id="run-new")
    restored = store.restore("run-new")
    assert restored is not None
    assert restored.progress.step == 3
    names = sorted(path.name for path in store.folder.glob("step-*"))
    assert names == ["step-000002", "step-000003", "step-000008", "step-000009"]
    assert read_progress(store.folder / "step-000009").run_id == "run-old", "not ours to prune"


def test_an_output_that_is_a_file_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(InputError, match="file"):
            make_store(folder)


def test_a_read_only_place_is_refused():
    # /proc takes no new folders, from root either.
    with pytest.raises(InputError, match=r"/proc/motley.*cannot be written"):
        make_store(Path("/proc/motley"))


SAVE_UNDER_LIMIT = """
import resource, signal, sys
from pathlib import Path
from tests.trainer.tiny_run import *
from trainer.checkpoint.store import CheckpointStore
from trainer.system.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
layout = tiny_layout(1024)
store = CheckpointStore(Path(sys.argv[1]), layout, tiny_config(), Path("base"))
store.save(tiny_state(1, layout).take_snapshot(), tiny_progress(1))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
try:
    store.save(tiny_state(2, layout).take_snapshot(), tiny_progress(2))
except StorageError as error:
    print("refused:", error)
print(sorted(path.name for path in store.folder.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(store.restore().progress.step)
store.save(tiny_state(3, layout).take_snapshot(), tiny_progress(3))
print(store.restore().progress.step)
"""


def test_a_file_size_limit_keeps_the_old_one(tmp_path: Path):
    assert resource.RLIMIT_FSIZE is not None
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SAVE_UNDER_LIMIT, tmp_path / "c"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused:")
    assert "File too large" in lines[0]
    assert lines[1:] == ["['latest', 'step-000001']", "1", "3"]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs root that may mount: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_keeps_the_old_one_and_recovers(small_disk: Path):
    layout = tiny_layout(2048)  # 270 KB a checkpoint
    store = CheckpointStore(small_disk, layout, tiny_config(keep_last=1), Path("base"))
    store.save(tiny_state(1, layout).take_snapshot(), tiny_progress(1))
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 600_000)
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(StorageError, match="No space left on device"):
        store.save(tiny_state(2, layout).take_snapshot(), tiny_progress(2))
    assert os.statvfs(small_disk).f_bavail == free, "the failed save gave its space back"
    restored = store.restore()
    assert restored is not None
    assert restored.state.compute_digest() == tiny_state(1, layout).compute_digest()
    ballast.unlink()
    store.save(tiny_state(3, layout).take_snapshot(), tiny_progress(3))
    assert store.latest_checkpoint() == small_disk / "step-000003"


def test_no_second_copy_of_the_tensors_in_memory(tmp_path: Path):
    import tracemalloc

    layout = tiny_layout(200_000)  # 8.8 MB of weights
    store = CheckpointStore(tmp_path, layout, tiny_config(), Path("base"))
    state = tiny_state(1, layout)
    tracemalloc.start()
    try:
        store.save(state.take_snapshot(), tiny_progress(1))
        saving = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        loaded, _ = store.load(tmp_path / "step-000001")
        loading = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert saving < 0.1 * state.weights.nbytes
    assert loading < 3.3 * state.weights.nbytes, "the three arrays themselves"
    assert loaded.compute_digest() == state.compute_digest()
    assert np.array_equal(loaded.weights, state.weights)


def test_a_removed_folder_is_not_called_intact(tmp_path: Path):
    store = make_store(tmp_path / "run")
    save(store, 1)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="the folder was removed, and every older one with it"):
        save(store, 2)
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    assert describe_older(tmp_path / "run") == "there is no older one"
