"""A trimmed tokenizer says everything that its teacher says, in tokens of its teacher's."""

from __future__ import annotations

import asyncio
import errno
import json
import unicodedata
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    models,
    pre_tokenizers,
)

from tests.trainer.bpe_teachers import corpus, everything, like_llama, like_qwen, plain
from trainer.commands.distill.trim_tokenizer import trim_tokenizer
from trainer.data.documents import Documents
from trainer.data.encoder import Encoder
from trainer.distill.tokenizer.bpe_merges import Bpe
from trainer.distill.tokenizer.trim import TrimResult, trim_to_size
from trainer.distill.tokenizer.vocabulary import Vocabulary
from trainer.init_model import END
from trainer.system.errors import InputError, StorageError
from trainer.system.storage.atomic_folder import Disk, verify_folder

SIZE = 1000


def few() -> Documents:
    """Return a corpus for what does not depend on it."""
    return Documents([Path(json.__file__).parent])


@dataclass
class Case:
    """A teacher's tokenizer, the one trimmed from it, and what trimming said."""

    folder: Path
    teacher: Tokenizer
    output: Path
    trimmed: Tokenizer
    vocabulary: Vocabulary
    report: TrimResult

    def mapped(self, text: str) -> list[int]:
        return self.vocabulary.teacher_ids[self.trimmed.encode(text).ids].tolist()


@pytest.fixture(
    scope="module", params=[plain, like_qwen, like_llama], ids=lambda make: make.__name__
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("teacher")
    request.param(folder)
    (folder / "config.json").write_text('{"vocab_size": 8192}')  # padded, as models are
    output = tmp_path_factory.mktemp("new") / "trimmed"
    report = trim_to_size(folder, corpus(), SIZE, output)
    return Case(
        folder,
        Encoder(folder).tokenizer,
        output,
        Encoder(output).tokenizer,
        Vocabulary.load_map(output, folder),
        report,
    )


def test_every_token_is_the_teachers(case: Case) -> None:
    ids = case.vocabulary.teacher_ids
    assert case.vocabulary.size == case.trimmed.get_vocab_size() == SIZE
    assert ids.dtype == np.int32
    assert np.all(np.diff(ids) > 0)
    for new, old in enumerate(ids.tolist()):
        assert case.trimmed.id_to_token(new) == case.teacher.id_to_token(old)
        assert case.trimmed.decode([new], False) == case.teacher.decode([old], False)
    assert set(pre_tokenizers.ByteLevel.alphabet()) <= case.trimmed.get_vocab().keys()


@settings(max_examples=300)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(case: Case, text: str) -> None:
    ids = case.trimmed.encode(text, add_special_tokens=False).ids
    expected = unicodedata.normalize("NFC", text) if case.teacher.normalizer else text
    assert case.trimmed.decode(ids, skip_special_tokens=False) == expected
    mapped = case.vocabulary.teacher_ids[ids].tolist()
    assert case.teacher.decode(mapped, skip_special_tokens=False) == expected


def test_words_whose_tokens_stayed_are_cut_as_before(case: Case) -> None:
    kept = set(case.vocabulary.teacher_ids.tolist())
    same = other = 0
    for word in {word for text in everything() for word in text.split()}:
        before = case.teacher.encode(word).ids
        if kept.issuperset(before):
            assert case.mapped(word) == before, word
            same += 1
        else:
            other += 1
    assert same > 1000
    assert other > 1000


def test_the_merges_are_closed(case: Case) -> None:
    bpe = Bpe(json.loads((case.output / "tokenizer.json").read_bytes()), "here")
    for token in bpe.ids.keys() - bpe.fixed:
        assert bpe.ids.keys() >= set(bpe.completions[token])
    whole = Bpe(json.loads((case.folder / "tokenizer.json").read_bytes()), "here")
    assert bpe.merges == whole.select_merges(set(bpe.ids))
    model = Tokenizer(models.BPE(vocab=bpe.ids, merges=bpe.merges)).model
    for token in bpe.ids.keys() - bpe.fixed:
        assert [part.value for part in model.tokenize(token)] == [token]


def test_special_tokens_work(case: Case) -> None:
    added = case.teacher.get_added_tokens_decoder().items()
    assert added
    for old, token in added:
        text = f"a {token.content}b"
        assert case.mapped(text) == case.teacher.encode(text).ids
        assert old in case.mapped(text)
    new = case.trimmed.get_added_tokens_decoder()
    assert [(t.content, t.special, t.normalized) for _, t in sorted(added)] == [
        (t.content, t.special, t.normalized) for _, t in sorted(new.items())
    ]
    ours, theirs = Encoder(case.output), Encoder(case.folder)
    assert ours.format == theirs.format
    assert case.vocabulary.teacher_ids[ours.end] == theirs.end
    assert case.vocabulary.teacher_ids[ours.prefix].tolist() == theirs.prefix


def test_transformers_opens_it(case: Case) -> None:
    import transformers

    ours = transformers.AutoTokenizer.from_pretrained(case.output)
    theirs = transformers.AutoTokenizer.from_pretrained(case.folder)
    text = 'def main():\n    return "ünïcode 2026"  # 漢字\n'
    assert ours(text).input_ids == case.trimmed.encode(text).ids
    assert case.vocabulary.teacher_ids[ours.all_special_ids].tolist() == theirs.all_special_ids
    assert len(ours) == SIZE
    assert ours.chat_template == theirs.chat_template
    assert ours.eos_token == theirs.eos_token


def test_the_report_is_what_a_recount_gives(case: Case) -> None:
    texts = [document.text for document in corpus()]
    before = [case.teacher.encode(text, add_special_tokens=False).ids for text in texts]
    after = [case.trimmed.encode(text, add_special_tokens=False).ids for text in texts]
    kept = set(case.vocabulary.teacher_ids.tolist())
    assert case.report == TrimResult(
        tokens=SIZE,
        teacher_tokens=case.teacher.get_vocab_size(),
        documents=len(texts),
        characters=sum(map(len, texts)),
        corpus_tokens=sum(map(len, after)),
        corpus_teacher_tokens=sum(map(len, before)),
        covered_tokens=sum(token in kept for ids in before for token in ids),
    )
    assert 1 < case.report.corpus_tokens / case.report.corpus_teacher_tokens < 1.4


def test_the_corpus_chooses_better_than_the_order_of_the_merges(case: Case) -> None:
    whole = Bpe(json.loads((case.folder / "tokenizer.json").read_bytes()), "here")
    first = whole.select_tokens(np.zeros(max(whole.ids.values()) + 1, dtype=np.int64), SIZE)
    assert len(first) == SIZE
    tree = json.loads((case.folder / "tokenizer.json").read_bytes())
    tree["model"]["vocab"] = {token: id for id, token in enumerate(sorted(first))}
    tree["model"]["merges"] = [list(merge) for merge in whole.select_merges(first)]
    tree["added_tokens"], tree["post_processor"] = [], None
    cut = Tokenizer.from_str(json.dumps(tree))
    cut.no_padding()
    by_order = sum(len(cut.encode(document.text).ids) for document in corpus())
    assert case.report.corpus_tokens < by_order


def test_made_counts_every_merge_that_a_text_applies(case: Case) -> None:
    tree = json.loads((case.folder / "tokenizer.json").read_bytes())
    tree["model"]["ignore_merges"] = False  # whole words that are looked up apply none
    teacher = Tokenizer.from_str(json.dumps(tree))
    bpe = Bpe(tree, "here")
    ranks = {merge: rank for rank, merge in enumerate(bpe.merges)}
    text = next(iter(corpus())).text[:4000]
    assert teacher.pre_tokenizer is not None
    expected: Counter[str] = Counter()
    for word, _ in teacher.pre_tokenizer.pre_tokenize_str(text):
        parts = list(word)
        expected.update(parts)
        while known := [pair for pair in pairwise(parts) if pair in ranks]:
            first = min(known, key=ranks.__getitem__)
            at = next(i for i in range(len(parts)) if (*parts[i : i + 2],) == first)
            parts[at : at + 2] = ["".join(first)]
            expected[parts[at]] += 1
    ids = teacher.encode(text, add_special_tokens=False).ids
    made = bpe.count_made_tokens(np.bincount(ids, minlength=max(bpe.ids.values()) + 1))
    assert {token: count for token, count in made.items() if count} == dict(expected)


def test_a_corpus_of_nothing_new_still_fills_the_size(case: Case, tmp_path: Path) -> None:
    data = tmp_path / "small.txt"
    data.write_text("x = 1\n")
    report = trim_to_size(case.folder, Documents([data]), SIZE, tmp_path / "out")
    assert report.tokens == SIZE
    assert report.corpus_tokens == report.corpus_teacher_tokens


def test_conversations_count_too(case: Case, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "zqzqzq"}, {"role": "assistant", "content": "vkvk"}]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": turns}) + "\n")
    report = trim_to_size(case.folder, Documents([data]), SIZE, tmp_path / "out")
    assert (report.documents, report.characters) == (1, 10)
    data.write_text(json.dumps({"prompt": "zqzqzq", "completion": "vkvk"}) + "\n")
    report = trim_to_size(case.folder, Documents([data]), SIZE, tmp_path / "more")
    assert (report.documents, report.characters) == (1, 10)


def test_sizes_that_cannot_be(tmp_path: Path, case: Case) -> None:
    fixed = 256 + len(case.teacher.get_added_tokens_decoder())
    for size in (0, fixed - 1, case.teacher.get_vocab_size()):
        with pytest.raises(InputError, match=f"size must be from {fixed} .* got {size}$"):
            trim_to_size(case.folder, few(), size, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    assert trim_to_size(case.folder, few(), fixed, tmp_path / "out").tokens == fixed


@pytest.mark.parametrize("unknown", [None, "Ā"])
def test_a_vocabulary_may_lack_bytes(tmp_path: Path, unknown: str | None) -> None:
    """As SmolLM2's: such a byte is dropped, or becomes the unknown token, before and after."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    plain(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    lacking = {"Ć", "ÿ", "õ"}  # the bytes 6, 255 and 245
    kept = [token for token in tree["model"]["vocab"] if not lacking & set(token)]
    tree["model"]["vocab"] = {token: number for number, token in enumerate(kept)}
    tree["model"]["merges"] = [m for m in tree["model"]["merges"] if not lacking & set("".join(m))]
    tree["model"]["unk_token"] = unknown
    for token in tree["added_tokens"]:
        token["id"] = kept.index(token["content"])
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(kept)}))
    trim_to_size(folder, few(), SIZE, tmp_path / "out")
    teacher, trimmed = Encoder(folder).tokenizer, Encoder(tmp_path / "out").tokenizer
    ids = Vocabulary.load_map(tmp_path / "out", folder).teacher_ids
    for text in ("a\x06b\x06", "import json\x06", "naïve ÿ 🙂"):
        expected = teacher.decode(teacher.encode(text).ids, skip_special_tokens=False)
        assert "\x06" not in expected
        assert teacher.decode(ids[trimmed.encode(text).ids].tolist(), False) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0), "is a Unigram tokenizer"),
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), "is a WordPiece tokenizer"),
        (models.WordLevel({"a": 0}, unk_token="a"), "is a WordLevel tokenizer"),
        (models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]), "BPE of characters"),
        (models.BPE({"a": 0}, [], end_of_word_suffix="</w>"), "has end_of_word_suffix '</w>'"),
        (models.BPE({"a": 0}, [], dropout=0.1), "has dropout 0.1"),
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, model: Any, message: str) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=message) as caught:
        trim_to_size(tmp_path, few(), 1000, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_folder_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    plain(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "sync", full)
        with pytest.raises(StorageError, match="No space left"):
            trim_to_size(folder, few(), SIZE, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    trim_to_size(folder, few(), SIZE, tmp_path / "out")
    files = {"tokenizer.json", "tokenizer_config.json", "vocabulary.json"}
    assert verify_folder(tmp_path / "out").keys() == files
    with pytest.raises(InputError, match="exists already"):
        trim_to_size(folder, few(), SIZE, tmp_path / "out")


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    plain(folder)
    data = str(Path(json.__file__).parent)
    call = [str(folder), "--data", data, "--data", asyncio.__file__, "--size", "2000", "-o"]
    first = CliRunner().invoke(trim_tokenizer, [*call, str(tmp_path / "one"), "--json"])
    report = json.loads(first.stdout)
    assert report["output"] == str(tmp_path / "one")
    assert report["tokens"] == 2000
    second = CliRunner().invoke(trim_tokenizer, [*call, str(tmp_path / "two")], prog_name="x")
    assert f"2,000 of {report['teacher_tokens']:,}" in second.stdout
    assert f"{report['corpus_tokens']:,} tokens instead of" in second.stdout
    for name in ("tokenizer.json", "vocabulary.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    tokenizer = Encoder(tmp_path / "one").tokenizer
    assert tokenizer.token_to_id(END) is not None
    half = CliRunner().invoke(trim_tokenizer, [*call[:-3], "-o", str(tmp_path / "half"), "--json"])
    assert json.loads(half.stdout)["tokens"] == report["teacher_tokens"] // 2, half.output
