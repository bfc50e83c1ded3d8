"""What a student is told of its data, and what it refuses without a teacher and without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.bigram_teacher import BigramTeacher
from tests.trainer.course import Course

RUN = """
import sys
from trainer.cli import main
sys.argv = ["trainer", *sys.argv[1:]]
try:
    main()
finally:
    print("torch" in sys.modules)
"""


def student(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", RUN, "distill", "student", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "held-out.jsonl: no such data file"),
        ("\0\0\0\0", "held-out.jsonl:1: not JSON"),
        ('{"text": "ls"}\n{"text": 3}\n', "held-out.jsonl:2: "),
        ('{"messages": [{"role": "tool", "content": "x"}]}\n', "held-out.jsonl:1: "),
    ],
)
def test_bad_validation_data_is_refused_at_once(
    model: Path, tmp_path: Path, content: str | None, problem: str
) -> None:
    """No teacher has begun, so nothing but the data can be what is refused."""
    validation = tmp_path / "held-out.jsonl"
    if content is not None:
        validation.write_text(content)
    words = ["--teacher-logits", tmp_path / "logits", "--student", model, "-o", tmp_path / "out"]
    done = student(*words, "--validation", validation, "--teacher-timeout", "60")
    assert done.returncode == 2, done.stderr
    assert problem in done.stderr.splitlines()[-1]
    assert "waiting" not in done.stderr
    assert done.stdout == "False\n"  # no torch


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    words = ["--teacher-logits", tmp_path / "logits", "--student", tmp_path / "none"]
    done = student(*words, "-o", tmp_path / "out", "--teacher-timeout", "60")
    assert done.returncode == 2, done.stderr
    assert "no such model folder" in done.stderr
    assert "waiting" not in done.stderr


def test_the_data_is_said_before_the_run(
    model: Path,
    teacher: BigramTeacher,
    logits: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    short = tmp_path / "short"
    shutil.copytree(model, short)
    tree = json.loads((short / "config.json").read_text())
    tree |= {"max_position_embeddings": 16, "attention_dropout": 0.1}
    (short / "config.json").write_text(json.dumps(tree))
    (short / "tokens_of_ours.json").write_text("{}")
    validation = tmp_path / "held-out.jsonl"
    validation.write_text('{"text": "ls"}\n' * 3 + json.dumps({"text": "ls " * 40}) + "\n")
    course = Course(
        tmp_path / "out", short, logits, data__validation=str(validation), training__max_steps=1
    )
    caplog.set_level("INFO")
    assert course.run() == 0
    lines = caplog.messages
    tokens = teacher.description.tokens
    assert f"data: {tokens:,} tokens of 36 documents in 36 windows of at most 24" in lines
    assert any(line.startswith("validation: 4 samples, ") for line in lines)
    assert any(
        line.startswith("validation: 1 sample is longer than max_seq_len 16") for line in lines
    )
    assert f"data.max_seq_len is lowered to 16: {short} has no more positions" in lines
    assert any("attention_dropout 0.1 is not applied" in line for line in lines)
    assert any("that are not used: 'tokens_of_ours.json' (1 time)" in line for line in lines)
