"""A student as a process: killed, stopped, starved, fed damage, on a full disk and a lost share."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest

from tests.cluster.real_cluster import PATIENCE, Bench, Cluster
from tests.cluster.real_process import Process
from tests.forked import run
from tests.waiting import wait_for
from trainer.distill.logits.dataset import LogitsFolder

pytestmark = pytest.mark.cluster

MAX_SEQ_LEN = 64


class Lesson(Cluster):
    """A teacher and a student, both of the shared small model, and the folder between them."""

    def __init__(self, bench: Bench, folder: Path, name: str = "run") -> None:
        super().__init__(bench, folder, name)
        self.logits = LogitsFolder(self.folder / "logits")

    def teacher(self, *flags: str) -> Process:
        """Start a teacher; small shards, small batches."""
        return self.start(
            "teacher",
            [
                *(sys.executable, "-m", "trainer.cli", "distill", "teacher", str(self.bench.model)),
                *("--data", str(self.bench.validation), "--out", str(self.logits.path)),
                *("--max-seq-len", str(MAX_SEQ_LEN), "--top-k", "8", "--shard-bytes", "512"),
                *("--dtype", "float32", "--gpu-backend", "cpu", "--threads", "1", *flags),
            ],
        )

    def student(
        self, *flags: str, timeout: float = PATIENCE, limits: Mapping[int, int] | None = None
    ) -> Process:
        """Start a student."""
        command = [
            *(sys.executable, "-m", "trainer.cli", "distill", "student", "--run-id", self.run_id),
            *("--teacher-logits", str(self.logits.path), "--student", str(self.bench.model)),
            *("-o", str(self.output), "--batch-size", "2", "--learning-rate", "0.003"),
            *("--set", "checkpoint.every=10", "--set", "checkpoint.keep_last=100"),
            *("--teacher-timeout", str(timeout), "--gpu-backend", "cpu", "--threads", "1", *flags),
        ]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        name = f"student-{len(self.processes)}"
        process = Process(name, command, self.folder, environment, limits)
        self.processes.append(process)
        return process

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records("step")]

    def check_whole(self) -> None:
        """Each step came once, and each took what follows on the one before."""
        steps = self.records("step")
        total = self.status["total_steps"]
        assert [step["step"] for step in steps] == list(range(1, total + 1))
        windows = self.logits.description.windows
        epochs = 1 + steps[-1]["epoch"]
        taken = [step["sample_ranges"][0][1:] for step in steps]
        assert sum(stop - start for start, stop in taken) == epochs * windows


@pytest.fixture(scope="module")
def taught(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lesson]:
    """A complete folder of logits, and what a student makes of it that nothing disturbs."""
    lesson = Lesson(bench, tmp_path_factory.mktemp("taught"), "straight")
    try:
        processes = [lesson.teacher(), lesson.student("--epochs", "2")]
        assert [process.wait(2 * PATIENCE) for process in processes] == [0, 0], lesson.logs()
        lesson.check_whole()
        yield lesson
    finally:
        lesson.end()


@pytest.fixture
def lesson(bench: Bench, tmp_path: Path) -> Iterator[Lesson]:
    """Return a lesson that leaves nothing running; its logs are shown when the test failed."""
    made = Lesson(bench, tmp_path)
    try:
        yield made
    finally:
        made.end()
        print(made.logs())


@pytest.fixture
def copied(taught: Lesson, lesson: Lesson) -> Lesson:
    """Return a lesson with a folder of its own that is complete."""
    copytree(taught.logits.path, lesson.logits.path)
    return lesson


def assert_same_end(disturbed: Lesson, straight: Lesson) -> None:
    """Compare the loss curves, and weights and both moments bit by bit."""
    assert disturbed.losses() == straight.losses()
    ours, theirs = disturbed.arrays(), straight.arrays()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name].view(np.uint32), theirs[name].view(np.uint32))


@pytest.mark.long
def test_killed_then_stopped_then_to_the_end(copied: Lesson, taught: Lesson) -> None:
    """The loss curve and the last bit are those of a run that nothing disturbed."""
    first = copied.student("--epochs", "2")
    copied.wait_event("checkpoint")  # a slow disk leaves out any but the first and the last
    first.kill()
    second = copied.student("--epochs", "2")
    copied.wait_event("resumed")  # until then the steps are those of the killed one
    copied.wait_step(35)
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    status = copied.status
    assert status["checkpoint"]["step"] == status["step"] < status["total_steps"]
    assert "SIGTERM" in status["reason"]
    assert copied.student("--epochs", "2").wait() == 0
    assert len(copied.events("resumed")) == 2
    copied.check_whole()
    assert_same_end(copied, taught)


@pytest.mark.timeout(600)  # six programs that load torch, one after the other
def test_a_student_that_is_first_and_a_teacher_that_dies(lesson: Lesson, taught: Lesson) -> None:
    """It waits, learns from what comes, names what is missing, and goes on when that comes."""
    first = lesson.student("--epochs", "2")
    first.says("waiting for")
    teacher = lesson.teacher("--batch-tokens", "64")
    fifth = lesson.logits.path / "shard-00004" / "manifest.json"
    wait_for(fifth.exists, "five shards", lesson, 2 * PATIENCE)  # torch and transformers, twice
    teacher.kill()
    missing = [f"shard-{number:05d}" for number in lesson.logits.list_missing()]
    assert missing, "the teacher was quicker than its end"
    wait_for(
        lambda: any(missing[0] in event["reason"] for event in lesson.events("waiting")),
        f"it says that it waits for {missing[0]}",
        lesson,
    )
    first.signal(signal.SIGTERM)
    assert first.wait() == 0, "also in the middle of a wait"
    learned = lesson.step
    assert 0 < learned < lesson.status["total_steps"]
    assert lesson.status["checkpoint"]["step"] == learned

    second = lesson.student("--epochs", "2", timeout=2.0)
    assert second.wait() == 3
    complaint = second.text.strip().splitlines()[-1]
    assert f"{missing[0]} is missing and no teacher is alive" in complaint
    assert "silent for" in complaint
    assert lesson.status["state"] == "failed"

    again = [lesson.teacher(), lesson.student("--epochs", "2")]
    assert [process.wait() for process in again] == [0, 0]
    lesson.check_whole()
    assert_same_end(lesson, taught)


@pytest.mark.smoke("distill")
def test_a_flipped_byte_is_asked_for_again(copied: Lesson) -> None:
    """The shard is moved away and named, training goes on, and a teacher makes it once more."""
    file = copied.logits.path / "shard-00002" / "logits.parquet"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    student = copied.student()
    damage = copied.wait_event("quarantined")
    assert str(file) in damage["reason"]
    request = copied.logits.path / "requests" / "shard-00002.json"
    waiting = copied.wait_event("waiting")
    assert "shard-00002" in waiting["reason"]
    assert request.exists()
    done = copied.step
    assert done > 0, "it went on with the other shards"
    teacher = copied.teacher()
    assert [teacher.wait(), student.wait()] == [0, 0]
    copied.check_whole()
    assert copied.step > done
    assert not request.exists()
    assert len(list((copied.logits.path / "quarantine").iterdir())) == 1
    verify = [sys.executable, "-m", "trainer.cli", "distill", "verify", str(copied.logits.path)]
    assert run(verify, os.environ).returncode == 0


SMALL_FILES = {resource.RLIMIT_FSIZE: 150_000}
"""A file may have 150 kB, less than a checkpoint needs."""


def test_a_full_disk_that_is_cleared(copied: Lesson) -> None:
    """An alarm, training goes on, and the next checkpoint, many steps on, is saved."""
    epochs = 5
    half = epochs * copied.logits.description.windows // 4  # batches of two: half of all steps
    flags = ("--epochs", str(epochs), "--set", f"checkpoint.every={half + 1}")
    student = copied.student(*flags, limits=SMALL_FILES)
    alarm = copied.wait_event("alarm")
    assert "checkpoint not saved" in alarm["reason"]
    resource.prlimit(
        student.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert student.wait() == 0
    assert copied.status["checkpoint"]["step"] == copied.step
    copied.check_whole()


def test_a_disk_that_stays_full(copied: Lesson) -> None:
    """The second save in a row that fails ends the run, long before its last step."""
    student = copied.student("--epochs", "100", limits=SMALL_FILES)
    assert student.wait() == 6
    assert copied.status["state"] == "failed"
    assert "the second save in a row" in copied.status["reason"]
    assert copied.step < copied.status["total_steps"]
    assert "Traceback" not in student.text


def test_a_share_that_is_away_for_a_while(copied: Lesson) -> None:
    """It waits with a message, and goes on when the folder is back; nothing is taken twice."""
    away = copied.logits.path.with_name("away")
    student = copied.student("--epochs", "4")
    copied.wait_step(5)
    copied.logits.path.rename(away)
    waiting = copied.wait_event("waiting")
    assert "shard-" in waiting["reason"]
    wait_for(lambda: copied.status["state"] == "waiting", "the status tells it", copied)
    away.rename(copied.logits.path)
    assert student.wait() == 0
    assert not list((copied.logits.path / "quarantine").iterdir())
    copied.check_whole()


def test_wrong_words_cost_one_line(lesson: Lesson) -> None:
    calls: list[tuple[list[str], str]] = [
        ([], "give --teacher-logits DIR, and --student MODEL"),
        (["--student", "x", "--student-config", "y"], "give --student MODEL, or --student-config"),
        (["--teacher-logits", "x", "--student", "y", "--gpu", "0,1"], "trains on one device"),
        (["--teacher-logits", "x", "--student", "y", "--alpha", "2"], "distillation.alpha: "),
    ]
    for flags, words in calls:
        command = [sys.executable, "-m", "trainer.cli", "distill", "student", *flags]
        result = run(command, os.environ)
        assert result.returncode == 2
        assert words in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
