"""A teacher that lives is known from one that is done, failed or silent, without wall clocks."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.trainer.clock import Clock
from tests.trainer.tiny_logits import SCHEMES, tiny_description, tiny_folder
from trainer.distill.logits.heartbeat import TeacherHeartbeat, TeacherWatch

DESCRIPTION = tiny_description(SCHEMES["topk"])


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path, DESCRIPTION, write=[])


def test_a_beat_is_read_as_it_was_written(folder):
    with TeacherHeartbeat(folder, "intel-1") as beat:
        beat.report_progress(shards_done=1, shards=3, tokens_per_second=812.5)
        [seen] = TeacherWatch(folder).list_teachers()
        assert (seen.state.name, seen.state.state) == ("intel-1", "running")
        assert (seen.state.shards_done, seen.state.shards) == (1, 3)
        assert seen.state.tokens_per_second == 812.5
        beat.report_progress(shards_done=3, shards=3, state="waiting")
        assert TeacherWatch(folder).list_teachers()[0].state.state == "waiting"
        beat.report_done()
    assert TeacherWatch(folder).list_teachers()[0].state.state == "done"


def test_a_start_with_nothing_to_do_keeps_the_rate_of_the_device(folder):
    def start(**said):
        with TeacherHeartbeat(folder, "a") as beat:
            beat.report_progress(shards_done=3, shards=3, **said)
            beat.report_done()
        [seen] = TeacherWatch(folder).list_teachers()
        return seen.state.tokens_per_second, seen.state.device

    assert start(tokens_per_second=812.5, device="cpu") == (812.5, "cpu")
    assert start() == (812.5, "cpu")
    assert start(device="cpu") == (812.5, "cpu")
    assert start(device="cuda:0") == (None, "cuda:0")
    (folder.path / "teachers" / "a.json").write_text('{"half')
    assert start() == (None, None)


def test_an_exception_is_the_reason(folder):
    with pytest.raises(OSError, match="no more"), TeacherHeartbeat(folder, "a"):
        raise OSError("no more")
    [seen] = TeacherWatch(folder).list_teachers()
    assert (seen.state.state, seen.state.reason) == ("failed", "no more")


def test_silence_is_measured_by_change_on_the_readers_clock(folder):
    clock = Clock(1000.0)
    path = folder.path / "teachers" / "a.json"
    with TeacherHeartbeat(folder, "a", interval=3600) as beat:
        os.utime(path, (0, 0))  # the teacher's clock is decades behind
        watch = TeacherWatch(folder, clock)
        assert watch.seconds_of_silence() == 0
        clock.now += 50
        assert watch.seconds_of_silence() == 50
        beat.report_progress(shards_done=0, shards=3)  # says the same, and yet another beat
        assert watch.seconds_of_silence() == 0
        clock.now += 10
        assert watch.list_teachers()[0].silent == 10
        path.write_text('{"half')
        assert watch.seconds_of_silence() == 10, "what cannot be read is no sign of life"
        beat.report_done()


def test_those_that_ended_are_no_sign_of_life(folder):
    clock = Clock(1000.0)
    watch = TeacherWatch(folder, clock)
    for name in ("a", "b"):
        with TeacherHeartbeat(folder, name) as beat:
            beat.report_done() if name == "a" else beat.report_failure("the disk is full")
    clock.now += 30
    assert [each.state.state for each in watch.list_teachers()] == ["done", "failed"]
    assert watch.seconds_of_silence() == 30
    with TeacherHeartbeat(folder, "c") as beat:
        assert watch.seconds_of_silence() == 0
        beat.report_done()


def test_a_killed_teacher_falls_silent(folder):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from trainer.distill.logits.dataset import LogitsFolder\n"
        "from trainer.distill.logits.heartbeat import TeacherHeartbeat\n"
        "beat = TeacherHeartbeat(LogitsFolder(Path(sys.argv[1])), 'a', interval=0.01)\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, folder.path],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process, process.stdout:
        process.stdout.readline()
        watch = TeacherWatch(folder)
        first = watch.list_teachers()[0].state
        process.send_signal(signal.SIGKILL)
        process.wait()
    watch.list_teachers()
    time.sleep(0.05)
    [seen] = watch.list_teachers()
    assert seen.state.state == first.state == "running"
    assert seen.silent >= 0.05


def test_a_full_disk_stops_no_teacher(folder, caplog):
    (folder.path / "teachers").rename(folder.path / "gone")
    with TeacherHeartbeat(folder, "a") as beat:
        beat.report_progress(shards_done=1, shards=3)
        beat.report_done()
    assert [each.message for each in caplog.records if "not written" in each.message]
