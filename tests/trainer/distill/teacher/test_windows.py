"""Documents in windows: every token once, and a plan that keeps its word."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.small_teacher import write_corpus, write_teacher, write_trimmed
from trainer.data.document_tokens import EncodedDocuments, ReadDocuments, open_documents
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.teacher.windows import WindowCutter
from trainer.system.errors import InputError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts.jsonl")


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "model", corpus)


def windows_of(corpus: Path, model: Path, max_seq_len: int = 32) -> WindowCutter:
    return WindowCutter(ReadDocuments(Documents([corpus]), Encoder(model)), max_seq_len)


def test_windows_hold_each_token_of_each_document_once_and_in_order(
    corpus: Path, model: Path
) -> None:
    windows, encoder = windows_of(corpus, model), Encoder(model)
    plans = windows.plan_shards(windows.split_documents(600))
    pieces = [piece for plan in plans for piece in windows.cut_shard(plan)]
    for number, sample in enumerate(Documents([corpus])):
        mine = [piece for piece in pieces if piece.document == number]
        found = np.concatenate([piece.tokens for piece in mine]).tolist()
        if sample.messages:
            assert found == encoder.encode_conversation(sample)[0]
        else:
            assert found == [*encoder.encode_texts([sample])[0], encoder.end]
        assert [piece.start for piece in mine] == list(range(0, len(found), 32))
    assert [piece.document for piece in pieces] == sorted(piece.document for piece in pieces)


def test_what_training_does_not_learn_is_not_scored(model: Path, tmp_path: Path) -> None:
    """The prompt and the turn of weight 0 are context, in whatever windows they lie."""
    data, encoder = tmp_path / "data.jsonl", Encoder(model)
    turns = [
        {"role": "user", "content": "Add 1 and 2. " * 20},
        {"role": "assistant", "content": "x + 2", "weight": 0},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "x + 3"},
    ]
    lines = [
        {"messages": turns},
        {"prompt": "def f1(x):", "completion": " return x"},
        {"text": "x"},
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    windows = windows_of(data, model)
    (plan,) = windows.plan_shards(windows.split_documents(1 << 20))
    pieces = windows.cut_shard(plan)
    for number, sample in enumerate(Documents([data])):
        mine = [piece for piece in pieces if piece.document == number]
        learned = np.concatenate(
            [[True] * len(p.tokens) if p.learned is None else p.learned for p in mine]
        )
        ids, labels = encoder.encode(sample)
        assert np.concatenate([piece.tokens for piece in mine]).tolist() == ids
        assert learned.tolist() == [label >= 0 for label in labels]
        assert learned.all() == (number == 2)
        assert not any(piece.is_scored[0] for piece in mine), "nothing precedes it"
    assert not pieces[0].is_scored.any(), "a window of the prompt alone"


def test_shards_depend_on_the_text_and_not_on_the_tokenizer(
    corpus: Path, model: Path, tmp_path: Path
) -> None:
    trimmed = write_trimmed(tmp_path / "trimmed", model, corpus)
    one, other = windows_of(corpus, model), windows_of(corpus, trimmed)
    assert one.split_documents(600) == other.split_documents(600)
    assert one.plan_shards(one.split_documents(600)) != other.plan_shards(
        other.split_documents(600)
    )


def test_a_shard_has_as_much_text_as_asked_for_but_the_last(corpus: Path, model: Path) -> None:
    sizes = [
        sum(len(turn.content) for turn in sample.messages) or len(sample.text)
        for sample in Documents([corpus])
    ]
    ranges = windows_of(corpus, model).split_documents(600)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(sizes)
    for (_, stop), (first, _) in pairwise(ranges):
        assert stop == first
    for first, stop in ranges[:-1]:
        assert sum(sizes[first:stop]) >= 600 > sum(sizes[first : stop - 1])
    assert len(windows_of(corpus, model).split_documents(1)) == len(sizes)
    assert windows_of(corpus, model).split_documents(1 << 30) == [(0, len(sizes))]


def test_documents_beyond_one_batch_of_the_tokenizer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.data.document_tokens._BATCH_BYTES", 1 << 16)
    path = tmp_path / "long.jsonl"
    texts = [f"x{number} = 1\n" * 2_000 for number in range(5)]  # 90 KB
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    windows, encoder = windows_of(path, model, 1024), Encoder(model)
    (plan,) = windows.plan_shards(windows.split_documents(1 << 30))
    pieces = windows.cut_shard(plan)
    for number, text in enumerate(texts):
        tokens = np.concatenate([each.tokens for each in pieces if each.document == number])
        assert encoder.tokenizer.decode(tokens.tolist()) == text


def test_a_text_that_ends_by_itself_ends_once(model: Path, tmp_path: Path) -> None:
    end = Encoder(model).tokenizer.id_to_token(Encoder(model).end or 0)
    path = tmp_path / "ended.jsonl"
    path.write_text(json.dumps({"text": f"x = 1{end}"}) + "\n")
    windows = windows_of(path, model)
    (plan,) = windows.plan_shards(windows.split_documents(1))
    (piece,) = windows.cut_shard(plan)
    assert piece.tokens.tolist().count(Encoder(model).end) == 1


def test_a_document_that_changed_meanwhile_is_an_error(model: Path, tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "texts.jsonl")
    windows = windows_of(path, model)
    plans = windows.plan_shards(windows.split_documents(600))
    path.write_text(path.read_text().replace("x + 3", "x + 4"))
    with pytest.raises(InputError, match="has changed"):
        [windows.cut_shard(plan) for plan in plans]


@pytest.mark.long
@pytest.mark.parametrize("last", ["c.csv", "c.jsonl"])
def test_encoded_rows_give_the_same_corpus_and_windows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer.data.row_entry.MOST_PROCESSES", 1)
    turns = [{"role": "user", "content": "Add. " * 9}, {"role": "assistant", "content": "x + 3ü"}]
    rows: list[dict[str, Any]] = [{"text": f"x = {n}\n" * (1 + n % 30)} for n in range(60)]
    rows += [{"prompt": f"def f{n}(x):", "completion": " return x"} for n in range(30)]
    first = tmp_path / "a.jsonl"
    first.write_text("".join(json.dumps(row) + "\n\n" for row in [*rows, {"messages": turns}]))
    (tmp_path / "c.csv").write_text("text\n" + "".join(f'"y, {n}"\n' for n in range(40)))
    (tmp_path / "c.jsonl").write_text('{"text": "z"}\n' * 9)
    paths = [first, tmp_path / last, first]
    plain = open_documents(paths, {}, Encoder(model))
    assert isinstance(plain, ReadDocuments), "little data"
    monkeypatch.setattr("trainer.data.encoded_rows.LEAST_BYTES", 0)
    encoded = open_documents(paths, {}, Encoder(model))
    assert isinstance(encoded, EncodedDocuments)
    assert (encoded.digest, len(encoded)) == (plain.digest, len(plain))
    mine, theirs = WindowCutter(plain, 32), WindowCutter(encoded, 32)
    ranges = mine.split_documents(600)
    assert theirs.split_documents(600) == ranges
    plans = mine.plan_shards(ranges)
    assert theirs.plan_shards(ranges) == plans
    for plan in plans:
        for one, other in zip(mine.cut_shard(plan), theirs.cut_shard(plan), strict=True):
            assert (one.document, one.start) == (other.document, other.start)
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.is_scored, other.is_scored)
