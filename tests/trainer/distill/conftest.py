"""What students learn from: hand-made logits for the tokenizer of the small model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.bigram_teacher import BigramTeacher


@pytest.fixture(scope="session")
def teacher(model: Path) -> BigramTeacher:
    return BigramTeacher(model, shards=6, windows=6)


@pytest.fixture
def logits(teacher: BigramTeacher, tmp_path: Path) -> Path:
    return teacher.write(tmp_path / "logits").path
