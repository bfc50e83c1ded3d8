"""The stream of a growing folder: one order, every window once, exact resume, honest errors."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder, tiny_windows
from trainer.data.order import permute_epoch
from trainer.distill.logits.dataset import SHARD_FILE, LogitsFolder
from trainer.distill.logits.heartbeat import TeacherHeartbeat
from trainer.distill.logits.stream import Position, ShardStream
from trainer.system.errors import InputError, UnreachableError

LENGTHS = tuple((3 + number % 4,) * (1 + number % 3) for number in range(14))
SHARDS = tuple((first, first + 2) for first in range(0, 14, 2))
DESCRIPTION = tiny_description(SCHEMES["kept"], lengths=LENGTHS, shards=SHARDS)


def write(folder, number):
    folder.write_shard(number, tiny_windows(DESCRIPTION, number, LENGTHS))


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "logits"
    folder = tiny_folder(path, DESCRIPTION, write=[])
    for plan in DESCRIPTION.shards:
        write(folder, plan.number)
    return path


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "logits")
    return LogitsFolder(tmp_path / "logits")


def make(folder, seed=1, group=3, timeout=0.2, **settings):
    return ShardStream(
        folder, seed=seed, order=permute_epoch, group=group, timeout=timeout, poll=0.01, **settings
    )


def key(window):
    return window.document, window.start


def keys(stream, position=None):
    return [key(window) for window, _ in stream.iterate_epoch(position)]


WHOLE = {
    key(window)
    for plan in DESCRIPTION.shards
    for window in tiny_windows(DESCRIPTION, plan.number, LENGTHS)
}


def damage(folder, number):
    os.truncate(folder.shard_path(number) / SHARD_FILE, 100)


def test_the_order_is_pure(folder):
    first = {epoch: keys(make(folder), Position(epoch=epoch)) for epoch in range(3)}
    again = {epoch: keys(make(folder), Position(epoch=epoch)) for epoch in (2, 0, 1)}
    assert first == again
    assert len({tuple(order) for order in first.values()}) == 3
    assert keys(make(folder, seed=2)) != first[0]
    for order in first.values():
        assert len(order) == len(set(order))
        assert set(order) == WHOLE
    shards = [document // 2 // 3 for document, _ in first[0]]
    assert shards == sorted(shards), "the first epoch takes groups as the teachers write them"
    shards = [document // 2 // 3 for document, _ in first[1]]
    assert shards != sorted(shards)


@pytest.mark.long
@settings(max_examples=40)
@given(
    seed=st.integers(0, 5),
    group=st.integers(1, 9),
    epoch=st.integers(0, 2),
    broken=st.sets(st.integers(0, len(SHARDS) - 1), max_size=4),
    stops=st.lists(st.integers(1, len(WHOLE)), max_size=3),
)
def test_no_window_twice_and_resume_is_exact(original, seed, group, epoch, broken, stops):
    """Shards are damaged, written again later, and the student is stopped at any places."""
    with TemporaryDirectory() as place:
        folder = LogitsFolder(Path(place) / "logits")
        shutil.copytree(original, folder.path)
        for number in broken:
            damage(folder, number)

        def mend(message):
            for number in folder.list_requests():
                shard = folder.shard_path(number)
                shutil.copytree(original / shard.name, shard)
                (folder.path / "requests" / f"{shard.name}.json").unlink()

        def run(position):
            stream = make(folder, seed, group, on_wait=mend)
            return [(key(window), behind) for window, behind in stream.iterate_epoch(position)]

        straight = run(Position(epoch=epoch))
        order = [each for each, _ in straight]
        assert len(order) == len(set(order))
        assert set(order) == WHOLE
        assert straight[-1][1] == Position(epoch=epoch + 1)
        shards = [document // 2 for document, _ in order]
        for number in broken:  # all others come first
            assert not set(shards[shards.index(number) :]) - broken
        for stop in stops:
            behind = straight[stop - 1][1]
            assert Position(**json.loads(json.dumps(vars(behind)))) == behind
            if behind.epoch > epoch:
                continue
            # What was not met before the stop may have been written again since, or not.
            assert sorted(each for each, _ in run(behind)) == sorted(order[stop:])
            for number in broken.difference(behind.postponed):
                damage(folder, number)
            assert run(behind) == straight[stop:]


def test_it_waits_for_a_slow_teacher(folder):
    """A shard takes longer than the timeout; the heartbeat tells that somebody works on it."""
    timeout = 2.0
    folder.shard_path(2).rename(folder.path / "away")
    messages = []
    with TeacherHeartbeat(folder, "intel-1", interval=0.02) as beat:

        def teach():
            time.sleep(1.2 * timeout)
            write(folder, 2)
            beat.report_done()

        teacher = threading.Thread(target=teach)
        teacher.start()
        found = keys(make(folder, timeout=timeout, on_wait=messages.append))
        teacher.join()
    assert set(found) == WHOLE
    assert messages[0] == "waits for shard-00002 (intel-1 running)"


def test_a_teacher_that_died_is_an_error(folder):
    folder.shard_path(4).rename(folder.path / "gone")
    beat = TeacherHeartbeat(folder, "intel-1", interval=3600)
    with pytest.raises(UnreachableError, match=r"shard-00004 .*intel-1 running, silent for"):
        keys(make(folder))
    beat.report_failure("the disk is full")
    with pytest.raises(UnreachableError, match="intel-1 the disk is full"):
        keys(make(folder))


def test_no_teacher_at_all_is_an_error(folder):
    folder.shard_path(0).rename(folder.path / "gone")
    with pytest.raises(UnreachableError, match=r"no teacher started within 0\.2 s; start `trainer"):
        keys(make(folder))


def test_done_with_missing_shards_says_which_and_what_to_run(folder):
    for number in (4, 6):
        folder.shard_path(number).rename(folder.path / f"gone-{number}")
    with TeacherHeartbeat(folder, "intel-1") as beat:
        beat.report_done()
    with pytest.raises(InputError, match=r"shards 4, 6 are missing .* run `trainer distill teach"):
        keys(make(folder))


def test_a_folder_that_goes_away_for_a_while_is_waited_for(folder, tmp_path_factory):
    """As a share that is unmounted and comes back."""
    away = tmp_path_factory.mktemp("away") / "logits"
    stream = make(folder, group=1, timeout=60, on_wait=lambda message: away.rename(folder.path))
    found = []
    for number, (window, _) in enumerate(stream.iterate_epoch()):
        found.append(key(window))
        if number == 3:
            folder.path.rename(away)
    assert found == keys(make(LogitsFolder(folder.path), group=1))
    assert list((folder.path / "quarantine").iterdir()) == []
