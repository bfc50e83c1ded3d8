"""A tokenizer is taken for a teacher's only when it was made from that teacher's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer import small_model as small
from trainer.data.documents import Documents
from trainer.distill.tokenizer.trim import trim_to_size
from trainer.distill.tokenizer.vocabulary import Vocabulary, tokenizer_digest
from trainer.system.errors import InputError, RefusedError


@pytest.fixture(scope="module")
def teacher(model: Path) -> Path:
    return model


@pytest.fixture
def trimmed(teacher: Path, data: Path, tmp_path: Path) -> Path:
    trim_to_size(teacher, Documents([data]), 280, tmp_path / "trimmed")
    return tmp_path / "trimmed"


def test_the_teachers_own_tokenizer_needs_no_file(teacher: Path, tmp_path: Path) -> None:
    shutil.copy(teacher / "tokenizer.json", tmp_path)
    for folder in (teacher, tmp_path):
        vocabulary = Vocabulary.load_map(folder, teacher)
        size = json.loads((teacher / "config.json").read_bytes())["vocab_size"]
        assert np.array_equal(vocabulary.teacher_ids, np.arange(size))
        assert vocabulary.tokenizer == vocabulary.teacher_tokenizer == tokenizer_digest(teacher)


def test_a_trimmed_one_knows_both(teacher: Path, trimmed: Path) -> None:
    vocabulary = Vocabulary.load_map(trimmed, teacher)
    assert vocabulary.size == 280
    assert vocabulary.tokenizer == tokenizer_digest(trimmed)
    assert vocabulary.teacher_tokenizer == tokenizer_digest(teacher)


def test_another_teacher_is_refused_with_both_hashes(
    teacher: Path, trimmed: Path, tmp_path: Path
) -> None:
    data = small.write_data(tmp_path / "other.jsonl", count=7)
    other = small.write_model(tmp_path / "other", data)
    theirs, ours, mine = (tokenizer_digest(path)[:16] for path in (other, trimmed, teacher))
    with pytest.raises(RefusedError, match=f"was trimmed from the tokenizer {mine}.*{theirs}"):
        Vocabulary.load_map(trimmed, other)
    with pytest.raises(RefusedError, match=f"not the teacher's \\({mine}.*{theirs}"):
        Vocabulary.load_map(teacher, other)
    shutil.copy(other / "tokenizer.json", trimmed)
    with pytest.raises(RefusedError, match=f"\\({theirs}\\) is not the one .* \\({ours}\\)"):
        Vocabulary.load_map(trimmed, teacher)


def test_a_model_that_lacks_rows_is_not_a_padded_one(teacher: Path, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    shutil.copytree(teacher, folder)
    config = json.loads((folder / "config.json").read_bytes())
    size = config["vocab_size"]
    for rows, fits in ((size + 100, True), (size, True), (size - 1, False)):
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
        if fits:
            assert Vocabulary.load_map(folder, folder).size == size
        else:
            with pytest.raises(InputError, match=f"makes {size} tokens, its model has {rows}"):
                Vocabulary.load_map(folder, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "other/1"}, "unknown schema 'other/1'"),
        ({"teacher_ids": None}, "damaged"),
        ({"teacher_ids": []}, "must ascend"),
        ({"teacher_ids": [0, 2, 1]}, "must ascend"),
        ({"teacher_ids": [-1, 0]}, "must ascend"),
        ({"teacher_ids": [1 << 40]}, "damaged"),
    ],
)
def test_a_damaged_file_is_named(
    teacher: Path, trimmed: Path, change: dict[str, Any], message: str
) -> None:
    path = trimmed / "vocabulary.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(InputError, match=f"vocabulary.json: .*{message}"):
        Vocabulary.load_map(trimmed, teacher)
    path.write_text("{")
    with pytest.raises(InputError, match="damaged"):
        Vocabulary.load_map(trimmed, teacher)


def test_folders_without_a_tokenizer(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read"):
        Vocabulary.load_map(tmp_path, teacher)
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read"):
        Vocabulary.load_map(teacher, tmp_path)
