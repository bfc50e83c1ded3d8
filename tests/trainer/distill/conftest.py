"""What students start from: a small model, and hand-made logits for its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from bigram_teacher import BigramTeacher
from small_model import write_data, write_model


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl")


@pytest.fixture(scope="session")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("student") / "model", data)


@pytest.fixture(scope="session")
def teacher(model: Path) -> BigramTeacher:
    return BigramTeacher(model, shards=6, windows=6)


@pytest.fixture
def logits(teacher: BigramTeacher, tmp_path: Path) -> Path:
    return teacher.write(tmp_path / "logits").path
