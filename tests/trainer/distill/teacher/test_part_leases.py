"""A part of a folder whose teacher was killed is taken over, and no other one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.trainer.clock import Clock
from tests.trainer.small_teacher import load, wish, write_corpus, write_teacher
from tests.waiting import wait_for
from trainer.distill.teacher import run as teacher_run
from trainer.distill.teacher.assignment import assign_request
from trainer.distill.teacher.run import PartLeases, TeacherRun
from trainer.distill.teacher.scoring import Teacher
from trainer.system.errors import NonFiniteError
from trainer.system.process.interruption import Interrupted
from trainer.system.storage.lease import Lease
from trainer.system.storage.lease_folder import newest_heartbeat

pytestmark = pytest.mark.cluster

Holder = subprocess.Popen[bytes]


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Holder]:
    """A process that holds part 1 of 2 below `logits/teachers`."""
    part = tmp_path / "logits" / "teachers" / "part-1-of-2"
    part.parent.mkdir(parents=True)
    command = [sys.executable, "-m", "tests.trainer.lease_holder", str(part), "0.6"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
        holder.kill()


def look_twice(parts: PartLeases, clock: Clock) -> list[tuple[int, Lease]]:
    """Look again after more than the silence, in which another sign of life would be heard."""
    found = list(parts.take_abandoned("me"))
    for _ in range(3):
        clock.now += 40
        found += parts.take_abandoned("me")
    return found


def test_only_a_dead_process_is_replaced(first: Holder, tmp_path: Path) -> None:
    teachers, clock = tmp_path / "logits" / "teachers", Clock()
    assert not look_twice(PartLeases(teachers, 2, 3, 100, clock), clock), "1 and 3 of 3 never began"
    parts = PartLeases(teachers, 2, 2, 100, clock)
    for _ in range(3):
        assert not list(parts.take_abandoned("me")), "its process lives"
        sign = newest_heartbeat(teachers / "part-1-of-2")
        wait_for(
            lambda sign=sign: newest_heartbeat(teachers / "part-1-of-2") != sign, "a sign of life"
        )
        clock.now += 40
    first.kill()
    first.wait()
    ((part, lease),) = look_twice(parts, clock)
    assert part == 1
    assert [parts.holds_shard(number) for number in (0, 1)] == [True, True]
    lease.release()
    assert not look_twice(PartLeases(teachers, 2, 2, 100, clock), clock), "it was released"


def test_the_other_teacher_makes_the_shards_of_a_killed_one(
    first: Holder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_run, "POLL", 0.02)
    monkeypatch.setattr(teacher_run, "PartLeases", partial(PartLeases, silence=3.0))
    corpus = write_corpus(tmp_path / "texts.jsonl")
    model = write_teacher(tmp_path / "model", corpus)
    assignment = assign_request(wish(model, corpus, tmp_path / "logits"))
    over = threading.Event()
    second = TeacherRun(assignment, lambda: load(assignment), share=(2, 2), over=over.is_set)
    thread = threading.Thread(target=partial(second.make_shards, stay=True))
    thread.start()
    folder = assignment.folder
    try:
        theirs = [plan.number for plan in assignment.description.shards[::2]]
        wait_for(lambda: folder.is_described and folder.list_missing() == theirs, "the own shards")
        first.kill()
        wait_for(lambda: not folder.list_missing(), "the shards of the killed one")
    finally:
        over.set()
        thread.join()
    assert not folder.list_missing()


@pytest.mark.parametrize("ends", ["fails", "is done and does not stay"])
def test_a_part_whose_teacher_ended_is_taken_over_by_one_that_stays(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else no one would score its shards, those that are found damaged later, and its answers."""
    monkeypatch.setattr(teacher_run, "POLL", 0.02)
    monkeypatch.setattr(teacher_run, "PartLeases", partial(PartLeases, silence=3.0))
    corpus = write_corpus(tmp_path / "texts.jsonl")
    model = write_teacher(tmp_path / "model", corpus)
    assignment = assign_request(wish(model, corpus, tmp_path / "logits"))
    folder, over = assignment.folder, threading.Event()
    second = TeacherRun(assignment, lambda: load(assignment), share=(2, 2), over=over.is_set)
    thread = threading.Thread(target=partial(second.make_shards, stay=True))
    thread.start()

    def refuse() -> Teacher:
        raise NonFiniteError("NaN")

    try:
        theirs = [plan.number for plan in assignment.description.shards[::2]]
        wait_for(lambda: folder.is_described and folder.list_missing() == theirs, "the own shards")
        if ends == "fails":
            with pytest.raises(NonFiniteError):
                TeacherRun(assignment, refuse, share=(1, 2)).make_shards()
        else:
            TeacherRun(assignment, lambda: load(assignment), share=(1, 2)).make_shards()
            shutil.rmtree(folder.shard_path(theirs[0]))
            folder.request_shard(theirs[0], "damaged")
        wait_for(lambda: not folder.list_missing(), "the shards of the other one")
    finally:
        over.set()
        thread.join()
    assert not folder.list_missing()


def test_a_part_that_was_stopped_in_order_is_left_to_who_will(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "texts.jsonl")
    model = write_teacher(tmp_path / "model", corpus)
    assignment = assign_request(wish(model, corpus, tmp_path / "logits"))

    def stop() -> None:
        raise Interrupted("enough")

    with pytest.raises(Interrupted):
        TeacherRun(assignment, lambda: load(assignment), share=(1, 2), check=stop).make_shards()
    clock = Clock()
    assert not look_twice(PartLeases(assignment.folder.teachers, 2, 2, 100, clock), clock)
