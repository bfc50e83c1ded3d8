"""A GGUF file's tokenizer is a student's if all tokens have its ids, and every document too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the launcher-only install has none")

from tests.trainer.gguf_files import write_gguf
from tests.trainer.small_teacher import TOPK, write_corpus, write_teacher, write_trimmed
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.teacher import assignment as module
from trainer.distill.teacher.assignment import Assignment, ScoringRequest, assign_request
from trainer.distill.tokenizer.vocabulary import tokenizer_digest
from trainer.model.files import resolve_model
from trainer.system.errors import InputError, RefusedError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def publisher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published folder, whose tokenizer composes no characters."""
    folder = tmp_path_factory.mktemp("publisher")
    return write_teacher(folder / "model", write_corpus(folder / "texts.jsonl", 12))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines = [{"text": "return x"}, {"text": "def f"}, {"text": "f(x): cafe\u0301"}]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def assigned(
    teacher: Path, tokenizer: Path | None, corpus: Path | None, tmp_path: Path
) -> Assignment:
    out, data = tmp_path / "logits", [corpus] if corpus else []
    return assign_request(
        ScoringRequest(model=str(teacher), data=data, output=out, tokenizer=tokenizer, scheme=TOPK)
    )


def test_the_publishers_own_file_is_proven_equal_once(
    publisher: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded: the GGUF file names rows that the publisher's tokenizer does not have."""
    file = write_gguf(tmp_path / "m.gguf", publisher)
    done = assigned(file, publisher, corpus, tmp_path)
    assert tokenizer_digest(done.model_dir) != tokenizer_digest(publisher)
    assert done.description.tokenizer.digest == tokenizer_digest(publisher)
    assert list(done.vocabulary.teacher_ids) == list(range(done.vocabulary.size))
    done.write_description(None)
    monkeypatch.delattr(module, "check_same_ids")  # what a folder says was proven before
    assert assigned(file, publisher, corpus, tmp_path).description == done.description
    assert LogitsFolder(tmp_path / "logits").is_described


def test_a_text_that_is_cut_otherwise_is_named_with_its_first_token(
    publisher: Path, corpus: Path, tmp_path: Path
) -> None:
    """The file claims that characters are composed first, which its publisher does not do."""
    file = write_gguf(tmp_path / "m.gguf", publisher, pre="qwen2")
    with pytest.raises(RefusedError) as refused:
        assigned(file, publisher, corpus, tmp_path)
    message = str(refused.value)
    assert message.startswith(f"{corpus}:3: token ")
    assert f" by {publisher} and " in message
    assert f" by the teacher {resolve_model(str(file))}, so their tokenizers differ" in message
    assert "\n" not in message
    assigned(file, None, corpus, tmp_path)  # with its own one it is what it is


def test_without_documents_nothing_is_proven(publisher: Path, tmp_path: Path) -> None:
    """A teacher may score a student's answers alone."""
    file = write_gguf(tmp_path / "m.gguf", publisher)
    with pytest.raises(InputError, match=f"--tokenizer {publisher} .*: give --data"):
        assigned(file, publisher, None, tmp_path)
    assert assigned(file, None, None, tmp_path).description.corpus.documents == 0


def test_another_vocabulary_is_refused_with_its_first_token(
    publisher: Path, corpus: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(publisher, other)
    tree = json.loads((other / "tokenizer.json").read_bytes())
    vocab = tree["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tree))
    file = write_gguf(tmp_path / "m.gguf", publisher)
    number = min(vocab[first], vocab[second])
    with pytest.raises(RefusedError, match=rf"{other}: .* the token {number} is .* there; use"):
        assigned(file, other, corpus, tmp_path)


def test_a_trimmed_one_is_the_files_own_or_refused(
    publisher: Path, corpus: Path, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", publisher)
    folder = resolve_model(str(file))
    own = write_trimmed(tmp_path / "own", folder, corpus)
    assert assigned(file, own, corpus, tmp_path).vocabulary.size == 266
    other = write_trimmed(tmp_path / "other", publisher, corpus)
    with pytest.raises(RefusedError, match="was trimmed from the tokenizer"):
        assigned(file, other, corpus, tmp_path)
