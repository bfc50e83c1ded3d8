"""What the data of a run holds is said before it starts: what is cut, doubled, shared, missing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.config.run import Task
from trainer.data import survey as module
from trainer.data.encoder import Encoder
from trainer.data.measurement import measure_samples
from trainer.data.sample_file import SampleFile
from trainer.data.samples import read_file
from trainer.data.shapes import Sample
from trainer.data.survey import describe_classes, survey


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
    assert lines[1:] == [
        "data: 1 sample is longer than max_seq_len 4 and cut: 2 tokens (22.2 %) are lost",
        "data: 1 sample has no token to learn",
    ]


def texts(path: Path, *lengths: int) -> SampleFile:
    return file(path, "causal-lm", None, *({"text": "x" * length} for length in lengths))


def test_one_enormous_sample_among_small_ones_is_not_missed(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MEASURED_BYTES", 100)
    train = texts(tmp_path / "a.jsonl", 3, 9000, 4, 8, 5)
    assert survey(train, None, encoder, 10, None) == [
        "data: 5 samples, about 9,028 tokens (2 samples measured), the longest has 9,001",
        "data: 1 sample is longer than max_seq_len 10 and cut: 8,991 tokens (99.6 %) are lost",
    ]


def test_what_cannot_be_measured_at_the_start_is_said(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MEASURED_BYTES", 100)
    lines = survey(texts(tmp_path / "a.jsonl", *[4] * 50, *[20] * 50), None, encoder, 10, None)
    assert lines == [
        "data: 100 samples, about 1,345 tokens (7 samples measured), the longest has 21",
        "data: at least 4 samples are longer than max_seq_len 10 and cut: at least 44 tokens (3.3"
        " %) are lost",
        "data: 46 samples that may be cut are not measured; trainer inspect-data measures all",
        "data: 98 duplicate samples",
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1, 300, 3000, 100_000])
def test_a_part_says_nothing_that_the_whole_denies(encoder: Encoder, seed: int, budget: int):
    draw = random.Random(seed)
    lengths = [int(draw.lognormvariate(3, 1)) + 1 for _ in range(200)]
    samples = [Sample("x" * length) for length in lengths]
    whole = measure_samples(samples, encoder, 40)
    assert (whole.measured, whole.longest) == (200, max(lengths) + 1)
    assert (whole.tokens, whole.cut) == (sum(lengths) + 200, sum(n >= 40 for n in lengths))
    assert sum(count for _, count in whole.build_histogram()) == 200
    part = measure_samples(samples, encoder, 40, budget)
    assert whole.cut - part.unknown <= part.cut <= whole.cut
    assert part.lost <= whole.lost
    assert part.unknown or (part.cut, part.lost) == (whole.cut, whole.lost)
    if part.is_complete:
        assert (part.tokens, part.unlearned) == (whole.tokens, whole.unlearned)


def test_names_that_are_nearly_the_same_are_said():
    assert list(describe_classes({"Spam": 3, "ham": 2, "spam ": 1})) == [
        "samples of each class: Spam 3, ham 2, spam  1",
        "classes that differ only in case or white space: 'Spam', 'spam '",
    ]
