"""A teacher and a student that learns from its own answers: both are killed, and go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.real_cluster import PATIENCE, Bench
from tests.cluster.test_distill_student import Lesson
from trainer.distill.answers.student_answers import RoundsFolder, find_rounds
from trainer.distill.logits.shard_folder import verify_shards

pytestmark = pytest.mark.cluster


@pytest.fixture
def lesson(bench: Bench, tmp_path: Path) -> Iterator[Lesson]:
    made = Lesson(bench, tmp_path)
    try:
        yield made
    finally:
        made.end()
        print(made.logs())


def written(rounds: RoundsFolder) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(rounds.path)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in rounds.path.rglob("shard-*/*.parquet")
    }


@pytest.mark.long
@pytest.mark.timeout(600)  # four programs that load torch
def test_both_are_killed_and_go_on_and_nothing_is_lost_or_twice(lesson: Lesson) -> None:
    prompts = lesson.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"rm {n}"}) + "\n" for n in range(5)))
    own = {"prompts": prompts, "max_new_tokens": 8, "staleness": 3}
    flags = ["--set", "training.max_steps=30", "--set", "checkpoint.every=4"]
    for key, value in own.items():
        flags += ["--set", f"distillation.on_policy.{key}={value}"]
    teacher = lesson.teacher("--stay")
    student = lesson.student(*flags)
    lesson.wait_event("checkpoint")  # a slow disk leaves out any but the first and the last
    teacher.kill()
    student.kill()
    (rounds,) = find_rounds(lesson.logits.path)
    before = written(rounds)
    until = str(lesson.output / "status.json")
    again = lesson.teacher("--stay", "--until", until)
    assert lesson.student(*flags).wait(2 * PATIENCE) == 0
    assert again.wait(PATIENCE) == 0, "the student's end ends its teacher"
    after = written(rounds)
    assert {name: after[name] for name in before} == before, "nothing was made twice"
    (same,) = find_rounds(lesson.logits.path)
    assert same.path == rounds.path
    assert [plan.number for plan in same.plans] == list(range(15))
    assert {verdict.state for verdict in verify_shards(same)} == {"whole"}
    assert {verdict.state for verdict in verify_shards(same.answers)} == {"whole"}
    steps = lesson.records("step")
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert all(step["on_policy_kl"] > -1e-6 for step in steps)
