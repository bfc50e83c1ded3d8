"""What the data of a run holds is said before it starts: what is cut, doubled, shared, missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.config.run import Task
from trainer.data import survey as module
from trainer.data.encoder import Encoder
from trainer.data.samples import SampleFile, read_file
from trainer.data.survey import survey


@pytest.fixture
def encoder(tmp_path: Path) -> Encoder:
    byte_tokenizer(tmp_path / "model")
    return Encoder(tmp_path / "model")


def file(path: Path, task: Task, classes: int | None, *trees: object) -> SampleFile:
    path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    return read_file(path, task, classes)


def test_classes_cuts_duplicates_and_what_validation_shares(tmp_path: Path, encoder: Encoder):
    train = file(
        tmp_path / "train.jsonl",
        "classify",
        4,
        {"input": "abcdef", "label": 0},
        {"input": "abcdef", "label": 0},
        {"input": "ab", "label": 2},
        {"input": "ab", "label": 0},
        {"input": "abcdefghij", "label": 0},
    )
    validation = file(
        tmp_path / "validation.jsonl",
        "classify",
        4,
        {"input": "ab", "label": 0},
        {"input": "xy", "label": 0},
    )
    assert survey(train, validation, encoder, max_seq_len=4, classes=4) == [
        "data: 5 samples, 26 tokens, the longest has 10",
        "data: 3 samples are longer than max_seq_len 4 and cut: 10 tokens (38.5 %) are lost",
        "data: samples of each class: 0 4, 1 0, 2 1, 3 0; none of 1, 3",
        "data: 1 duplicate sample, 1 text with several labels",
        "data: 1 of 2 validation samples is also in train, so validation is too optimistic",
    ]


def test_nothing_is_said_where_there_is_nothing(tmp_path: Path, encoder: Encoder):
    train = file(tmp_path / "train.jsonl", "causal-lm", None, {"text": "abc"}, {"text": "b"})
    assert survey(train, None, encoder, max_seq_len=4, classes=None) == [
        "data: 2 samples, 6 tokens, the longest has 4"
    ]


def test_answers_that_are_cut_off_are_counted(tmp_path: Path, encoder: Encoder):
    train = file(
        tmp_path / "train.jsonl",
        "causal-lm",
        None,
        {"prompt": "abcd", "completion": "e"},
        {"prompt": "a", "completion": "e"},
    )
    lines = survey(train, None, encoder, max_seq_len=4, classes=None)
    assert lines[1] == (
        "data: 1 sample is longer than max_seq_len 4 and cut: 2 tokens (22.2 %) are lost;"
        " 1 without a token to learn"
    )


def test_of_large_data_a_part_is_measured(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MEASURED_BYTES", 100)
    rows = [{"text": "abcd"}] * 50 + [{"text": "x" * 20}] * 50
    lines = survey(
        file(tmp_path / "train.jsonl", "causal-lm", None, *rows), None, encoder, 10, None
    )
    assert lines == [
        "data: 100 samples, about 1,211 tokens (9 samples measured), the longest has 21",
        "data: about 44 samples are longer than max_seq_len 10 and cut: about 489 tokens (40.4 %)"
        " are lost",
        "data: 98 duplicate samples",
    ]
