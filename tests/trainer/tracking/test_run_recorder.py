"""What a recorder does when the disk cannot keep up."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.trainer.tiny_run import tiny_config, tiny_layout, tiny_state
from tests.waiting import wait_for
from trainer.checkpoint.reader import Resumed, RunProgress
from trainer.config.run import RunConfig
from trainer.exchange.protocol.actions import Save, Step
from trainer.exchange.protocol.schedule import StepPlan
from trainer.optimizer.adamw import Snapshot
from trainer.system.errors import StorageError, UnprovedError
from trainer.system.process.child import SAVING_VARIABLE
from trainer.tracking.metrics import read_metrics
from trainer.tracking.notifier import Notifier
from trainer.tracking.run_recorder import RunRecorder
from trainer.tracking.status import read_status


class StuckStore:
    """Stands for a CheckpointStore on a disk that hangs until it is let go."""

    lease = None

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()
        self.saved: list[int] = []

    def save(self, snapshot: Any, progress: Any, metric: float | None) -> Path:
        self.begun.set()
        assert self.free.wait(30)
        self.saved.append(snapshot.step)
        snapshot.close()
        return Path(f"step-{snapshot.step:06d}")

    def write_publication(self) -> None:
        pass

    def release(self) -> None:
        pass


class FullStore(StuckStore):
    """Stands for one on a disk that is full at first: so many saves fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.free.set()

    def save(self, snapshot: Any, progress: Any, metric: float | None) -> Path:
        if self.failures:
            self.failures -= 1
            raise StorageError(f"step-{snapshot.step:06d}: checkpoint not saved: disk full")
        return super().save(snapshot, progress, metric)


class KeepingStore(StuckStore):
    """Keeps what is said of each checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[RunProgress] = []
        self.free.set()

    def save(self, snapshot: Any, progress: Any, metric: float | None) -> Path:
        self.kept.append(progress)
        return super().save(snapshot, progress, metric)


class BrokenStore(StuckStore):
    """Has a defect."""

    def save(self, snapshot: Any, progress: Any, metric: float | None) -> Path:
        raise AssertionError("a defect")


def recorder_of(
    store: StuckStore,
    folder: Path,
    config: RunConfig | None = None,
    notifier: Notifier | None = None,
) -> RunRecorder:
    job: Any = SimpleNamespace(
        run_id="run", data_digest="d" * 64, model_digest="m" * 64, base_digest=None
    )
    given: Any = (folder, store, config or tiny_config(), job, StepPlan(100, 10, 1), 1)
    return RunRecorder(*given, notifier=notifier)


@pytest.fixture
def store() -> StuckStore:
    return StuckStore()


@pytest.fixture
def recorder(store: StuckStore, tmp_path: Path) -> RunRecorder:
    return recorder_of(store, tmp_path)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that is there while something is being saved."""
    path = tmp_path / "saving"
    monkeypatch.setenv(SAVING_VARIABLE, str(path))
    return path


def save_of(step: int, validation: dict[str, Any] | None = None) -> Save:
    return Save(tiny_state(step, tiny_layout()).take_snapshot(), 1, validation)


def test_a_slow_disk_does_not_pile_up_snapshots(recorder: RunRecorder, store: StuckStore) -> None:
    """A checkpoint that waits gives way to a newer one: each would keep three gradients alive."""
    saves = [save_of(step) for step in range(1, 6)]
    recorder.save(saves[0])
    assert store.begun.wait(30)
    for save in saves[1:]:
        recorder.save(save)
    snapshots = [cast("Snapshot", save.snapshot) for save in saves]
    assert [snapshot.is_closed for snapshot in snapshots] == [False, True, True, True, False]
    store.free.set()
    assert recorder.close(0, "done") == 0
    assert store.saved == [1, 5]


def test_a_defect_in_the_last_save_is_no_success(tmp_path: Path) -> None:
    recorder = recorder_of(BrokenStore(), tmp_path)
    recorder.save(save_of(1))
    assert recorder.close(0, "done") == 6


def test_a_rated_checkpoint_does_not_give_way(recorder: RunRecorder, store: StuckStore) -> None:
    """It may be the best one."""
    recorder.save(save_of(1))
    assert store.begun.wait(30)
    recorder.save(save_of(2, {"loss": 1.0, "accuracy": 0.5}))
    recorder.save(save_of(3))
    recorder.save(save_of(4))
    store.free.set()
    assert recorder.close(0, "done") == 0
    assert store.saved == [1, 2, 4]


def saved_in_turn(recorder: RunRecorder, mark: Path, *steps: int) -> None:
    """Save steps, each after the one before has come to its end."""
    for step in steps:
        recorder.save(save_of(step))
        wait_for(lambda: not mark.exists(), f"step {step} is saved")


def test_a_failed_save_is_an_alarm_and_a_second_one_in_a_row_halts(mark: Path) -> None:
    recorder = recorder_of(FullStore(2), mark.parent)
    saved_in_turn(recorder, mark, 1)
    assert recorder.failure is None
    saved_in_turn(recorder, mark, 2)
    assert isinstance(recorder.failure, StorageError)
    said = str(recorder.failure)
    assert "step-000002: checkpoint not saved: disk full" in said
    assert "the second save in a row" in said
    assert recorder.close(recorder.failure.exit_code, said) == 6


def test_a_save_that_succeeds_in_between_forgives_the_first(mark: Path) -> None:
    store = FullStore(1)
    recorder = recorder_of(store, mark.parent)
    saved_in_turn(recorder, mark, 1, 2)
    store.failures = 1
    saved_in_turn(recorder, mark, 3)
    assert recorder.failure is None
    saved_in_turn(recorder, mark, 4)
    assert store.saved == [2, 4]
    assert recorder.close(0, "done") == 0


def test_a_defect_counts_like_a_full_disk(mark: Path) -> None:
    recorder = recorder_of(BrokenStore(), mark.parent)
    saved_in_turn(recorder, mark, 1, 2)
    assert isinstance(recorder.failure, StorageError)
    recorder.close(6, "")


def test_a_resumed_run_goes_on_counting_validations(tmp_path: Path) -> None:
    """What ends early is completed, not stopped: there is nothing to resume."""
    chosen = {"training.evaluate_every": 1, "training.early_stopping_patience": 2}
    config = tiny_config().with_settings({"data.validation": "held-out.jsonl", **chosen})
    store = KeepingStore()
    before = recorder_of(store, tmp_path / "before", config)
    for step in (1, 2):
        before.emit({"event": "validation", "at_step": step, "loss": 1.0})
    before.save(save_of(2, {"loss": 1.0}))
    assert before.close(0, "stopped by SIGTERM") == 0
    after = recorder_of(store, tmp_path / "after", config)
    after.resume(Resumed(Path("step-000002"), store.kept[0], ()))
    for step in (2, 3):
        assert after.early.stop_reason is None
        after.emit({"event": "validation", "at_step": step, "loss": 1.0})
    assert after.early.stop_reason is not None
    assert after.close(0, after.early.stop_reason) == 0
    assert read_status(tmp_path / "after" / "status.json")["state"] == "completed"


def test_an_unproved_end_whose_checkpoint_failed_is_the_disks_fault(mark: Path) -> None:
    recorder = recorder_of(FullStore(1), mark.parent)
    saved_in_turn(recorder, mark, 1)
    assert recorder.close(UnprovedError.exit_code, "not proved") == StorageError.exit_code


def test_a_mark_says_while_something_is_being_saved(store: StuckStore, mark: Path) -> None:
    """A supervisor gives a process that saves more time to end."""
    recorder = recorder_of(store, mark.parent)
    assert not mark.exists()
    recorder.save(save_of(1))
    assert mark.exists(), "from the moment that it is asked for"
    assert store.begun.wait(30)
    recorder.save(save_of(2))
    store.free.set()
    wait_for(lambda: not mark.exists(), "both are saved")
    assert store.saved == [1, 2]
    store.free.clear()
    recorder.save(save_of(3))
    assert mark.exists()
    store.free.set()
    assert recorder.close(0, "done") == 0
    assert not mark.exists()


def test_a_mark_that_cannot_be_made_is_no_reason_not_to_save(
    store: StuckStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SAVING_VARIABLE, str(tmp_path / "gone" / "saving"))
    recorder = recorder_of(store, tmp_path)
    store.free.set()
    recorder.save(save_of(1))
    assert recorder.close(0, "done") == 0
    assert store.saved == [1]


def test_a_run_that_waits_says_so_until_it_goes_on(recorder: RunRecorder, tmp_path: Path) -> None:
    def state() -> tuple[str, str | None]:
        status = read_status(tmp_path / "status.json")
        return status["state"], status["reason"]

    student = {"rank": 0, "host": "here", "device": "cpu", "backend": "cpu", "backend_reason": ""}
    recorder.emit({"event": "joined", **student})
    assert state() == ("running", None)
    recorder.emit({"event": "waiting", "reason": "for shard 3"})
    assert state() == ("waiting", "for shard 3")
    recorder.log_step(
        Step(
            step=1,
            epoch=0,
            generation=0,
            loss=2.0,
            ce=3.0,
            kl=1.0,
            alpha=0.5,
            learning_rate=1e-3,
            grad_norm=1.0,
            seconds=0.1,
            tokens_per_second=10.0,
            exchange_ms=40.0,
            exchange_exposed_ms=8.0,
            worker_tokens_per_second={0: 10.0},
            sample_ranges=[[0, 0, 10]],
        )
    )
    assert state() == ("running", None)
    (record,) = [r for r in read_metrics(tmp_path / "metrics.jsonl") if r["kind"] == "step"]
    assert (record["ce"], record["kl"], record["alpha"]) == (3.0, 1.0, 0.5)
    assert (record["exchange_ms"], record["exchange_exposed_ms"]) == (40.0, 8.0)
    assert "teacher_wait_seconds" not in record, "what is not known is not recorded"
    status = read_status(tmp_path / "status.json")
    assert (status["exchange_ms"], status["exchange_exposed_ms"]) == (40.0, 8.0)
    recorder.close(0, "done")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("no GPU was found (cuda: there is no NVIDIA driver (libcuda.so.1))", False),
        ("cuda: cuda:0 computes a wrong product", True),
    ],
)
def test_a_device_that_failed_is_told_at_the_end_and_no_other(
    recorder: RunRecorder,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    told: bool,
) -> None:
    who = {"host": "a", "device": "cpu", "backend": "cpu", "backend_reason": reason}
    recorder.emit({"event": "joined", "rank": 0, **who})
    recorder.close(0, "done")
    assert (f"worker 0 computed on cpu: {reason}" in caplog.text) == told
    assert read_status(tmp_path / "status.json")["workers"][0]["backend_reason"] == reason


def test_an_idle_worker_is_active_again_when_it_has_a_share(
    recorder: RunRecorder, tmp_path: Path
) -> None:
    who = {"host": "a", "device": "cpu", "backend": "cpu", "backend_reason": ""}
    recorder.emit({"event": "joined", "rank": 0, **who})
    states = [read_status(tmp_path / "status.json")["workers"][0]["state"]]
    for event in ({"event": "idle", "reason": "would slow the step"}, {"event": "active"}):
        recorder.emit({**event, "rank": 0})
        states.append(read_status(tmp_path / "status.json")["workers"][0]["state"])
    assert states == ["active", "idle", "active"]
    recorder.close(0, "done")


def test_the_end_is_said_where_the_checkpoints_lie(store: StuckStore, tmp_path: Path) -> None:
    """Another host sees the share, and not the output folder."""
    share: Any = store
    share.folder = tmp_path / "share" / "run"
    config = tiny_config()
    elsewhere = config.checkpoint.model_copy(update={"folder": str(share.folder)})
    config = config.model_copy(update={"checkpoint": elsewhere})
    recorder = recorder_of(share, tmp_path / "output", config)
    assert not (share.folder / "status.json").exists()
    assert recorder.close(5, "NaN in the loss") == 5
    said = read_status(share.folder / "status.json")
    assert (said["state"], said["exit_code"]) == ("failed", 5)
    assert read_status(tmp_path / "output" / "status.json")["exit_code"] == 5
