"""What reaches the device: each window once an epoch, from where a run left off, and no hanging."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.bigram_teacher import LENGTHS, BigramTeacher
from trainer.config.distillation import DistillationConfig
from trainer.data.encoder import IGNORED
from trainer.data.order import permute_epoch
from trainer.distill.logits.stream import Position, ShardStream
from trainer.distill.student.prefetch import Batch, BatchPrefetcher, Preparation, iterate_batches
from trainer.exchange.protocol.schedule import StepPlan
from trainer.system.process.stop_signals import StopRequest

WINDOWS = 24
PLAN = StepPlan(WINDOWS, batch_size=5, epochs=2)


@pytest.fixture(scope="module")
def teacher(model: Path) -> BigramTeacher:
    return BigramTeacher(model)


@pytest.fixture(scope="module")
def logits(teacher: BigramTeacher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher.write(tmp_path_factory.mktemp("logits")).path


def read(
    teacher: BigramTeacher, path: Path, step: int = 0, position: Position | None = None
) -> list[Batch]:
    stream = ShardStream(teacher.folder(path), seed=3, order=permute_epoch, group=2)
    prepare = Preparation(teacher.scheme, DistillationConfig(), 512)
    return list(iterate_batches(stream, PLAN, step, position or Position(), prepare))


def test_each_epoch_has_every_window_once_in_its_own_order(
    teacher: BigramTeacher, logits: Path
) -> None:
    steps = read(teacher, logits)
    assert [len(batch.samples) for batch in steps] == 2 * [5, 5, 5, 5, 4]
    first, second = ([d for b in part for d in b.documents] for part in (steps[:5], steps[5:]))
    assert sorted(first) == sorted(second) == list(range(WINDOWS))
    assert first != second


def test_a_window_is_cut_with_its_targets(teacher: BigramTeacher) -> None:
    window = max(teacher.written[0], key=lambda window: len(window.tokens))
    assert LENGTHS[0] + 2 < len(window.tokens)
    whole = Preparation(teacher.scheme, DistillationConfig(), 512)(window)
    cut = Preparation(teacher.scheme, DistillationConfig(), LENGTHS[0])(window)
    np.testing.assert_array_equal(cut.input_ids, window.tokens[: LENGTHS[0]])
    assert isinstance(cut.labels, np.ndarray)
    np.testing.assert_array_equal(cut.labels, [IGNORED, *window.tokens[1 : LENGTHS[0]]])
    assert cut.soft is not None
    assert whole.soft is not None
    assert len(cut.soft.rest) == LENGTHS[0]
    np.testing.assert_array_equal(cut.soft.ids, whole.soft.ids[: len(cut.soft.ids)])


def nobody(event: str, message: str) -> None:
    raise AssertionError(f"{event}: {message}")


def test_a_share_that_answers_with_errors_is_waited_for(
    teacher: BigramTeacher, logits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is damaged, nothing is moved away, and the order stays what it was."""
    share = Share(logits)
    share.mount(monkeypatch)
    told: list[str] = []

    def on_wait(message: str) -> None:
        told.append(message)
        share.away = False

    stream = ShardStream(
        teacher.folder(logits),
        seed=3,
        order=permute_epoch,
        group=2,
        on_wait=on_wait,
        on_damage=pytest.fail,
        poll=0.01,
    )
    prepare = Preparation(teacher.scheme, DistillationConfig(), 512)
    steps = iterate_batches(stream, PLAN, 0, Position(), prepare)
    taken = [next(steps).documents]
    for _ in range(1, PLAN.total_steps):
        share.away = True  # also between the look for a shard and reading it
        taken.append(next(steps).documents)
    share.away = False
    assert taken == [batch.documents for batch in read(teacher, logits)]
    assert told
    assert not list((logits / "quarantine").iterdir())


def _exists(path: Path) -> bool:
    """Ask as Python 3.11 does: 3.14's does not go by `Path.stat`, so that nothing could fail."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


class Share:
    """Answers each call below a folder with EIO while it is away, but the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._late = self._away = False

    @property
    def away(self) -> bool:
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away, self._late = away, away

    def mount(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("stat", "open", "rename"):
            monkeypatch.setattr(Path, name, self._failing(getattr(Path, name)))
        monkeypatch.setattr(Path, "exists", _exists)

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(path: Path, *args: Any, **options: Any) -> Any:
            if self._away and path.is_relative_to(self.folder):
                if not self._late:
                    raise OSError(errno.EIO, "Input/output error", str(path))
                self._late = False
            return call(path, *args, **options)

        return failing


def never(feed: BatchPrefetcher) -> Iterator[Batch]:
    """Find damage and wait for what never comes."""
    feed.record_damage("shard-00007 is damaged")
    while True:
        feed.on_wait("waits for shard-00000")
        time.sleep(0.05)
    yield  # pyright: ignore[reportUnreachable]  # makes this a generator


def test_a_wait_is_told_once_and_ends_when_asked() -> None:
    stop, told = StopRequest(), list[tuple[str, str]]()
    feed = BatchPrefetcher(never, stop)
    threading.Timer(1.0, stop.request, ["SIGTERM"]).start()
    assert feed.take_batch(lambda *what: told.append(what)) is None
    assert told == [("quarantined", "shard-00007 is damaged"), ("waiting", "waits for shard-00000")]
    feed.close()
    assert not feed.running


def test_batches_that_nobody_takes_do_not_keep_it(teacher: BigramTeacher, logits: Path) -> None:
    steps = read(teacher, logits)
    feed = BatchPrefetcher(lambda _: iter(steps), StopRequest())
    assert feed.take_batch(nobody) is steps[0]
    feed.close()
    assert not feed.running
