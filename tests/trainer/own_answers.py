"""A student that learns from its own answers, and a teacher that stays and scores them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.trainer.course import Course
from tests.trainer.small_teacher import load, wish
from trainer.distill.answers.student_answers import RoundsFolder, find_rounds
from trainer.distill.teacher.assignment import assign_request
from trainer.distill.teacher.run import TeacherRun

PROMPTS = ["def f1", "def f2(x)", "return x", "def", "f3(x): return", "x + 1 def", "return"]
OWN = "distillation__on_policy__"


@contextmanager
def teaching(
    model: Path, corpus: Path, output: Path, data: list[Path] | None = None, **changes: Any
) -> Iterator[None]:
    """A teacher that stays, in a thread of this process."""
    wanted = wish(model, corpus, output, **changes)
    assignment = assign_request(replace(wanted, data=wanted.data if data is None else data))
    over, failures = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            TeacherRun(assignment, lambda: load(assignment), over=over.is_set).make_shards(
                stay=True
            )
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures


def course(output: Path, student: Path, logits: Path, **settings: Any) -> Course:
    prompts = output.with_suffix(".prompts.jsonl")
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))
    usual: dict[str, Any] = {
        f"{OWN}prompts": str(prompts),
        f"{OWN}max_new_tokens": 8,
        f"{OWN}staleness": 3,
        f"{OWN}fraction": 0.4,
        "training__max_steps": 8,
        "training__batch_size": 5,
        "checkpoint__every": 3,
        "data__max_seq_len": 64,
    }
    return Course(output, student, logits, **usual | settings)


def rounds_of(logits: Path) -> RoundsFolder:
    (rounds,) = find_rounds(logits)
    return rounds


def flip(path: Path) -> None:
    """Damage a file in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
