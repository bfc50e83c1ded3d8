"""Trim a tokenizer to the tokens that a corpus needs; all of them are the teacher's.

A trimmed tokenizer encodes every text that the whole one can, in a few more tokens. Its ids are
compact, in the teacher's order; `vocabulary.json` maps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.data.documents import Documents
from trainer.data.tokenizer_folder import load_tokenizer
from trainer.distill.tokenizer.bpe_merges import Bpe
from trainer.distill.tokenizer.vocabulary import FILE, SCHEMA, tokenizer_digest
from trainer.model.formats import template_files
from trainer.system.errors import InputError
from trainer.system.regular_file import read_file
from trainer.system.storage.new_folder import check_new, write_new

_AS_THEY_ARE = ("special_tokens_map.json", "chat_template.json")
_SIZE = 32768
_BATCH = 4 << 20  # characters that are tokenised at once


@dataclass(frozen=True, kw_only=True)
class TrimResult:
    """The result of trimming, and its cost on the corpus."""

    tokens: int
    teacher_tokens: int
    documents: int
    characters: int
    corpus_tokens: int
    """Tokens of the trimmed tokenizer, without special tokens around a text."""
    corpus_teacher_tokens: int
    covered_tokens: int
    """The kept ones of the teacher's corpus tokens."""


def trim_to_size(
    tokenizer_dir: Path, documents: Documents, size: int | None, output: Path
) -> TrimResult:
    """Write a tokenizer of `size` tokens into a new folder, which appears whole or not at all.

    The default size is 32,768, or half of a vocabulary that is not larger.

    Raises:
        InputError: the tokenizer is not a byte-level BPE, or `size` is not between its fixed tokens
            and all of them; `output` holds something; the corpus changes while it is read.
        StorageError: the write failed.
    """
    check_new(output)
    teacher = load_tokenizer(tokenizer_dir)
    path = tokenizer_dir / "tokenizer.json"
    tree: Any = json.loads(read_file(path))
    bpe = Bpe(tree, str(path))
    if size is None:
        size = _SIZE if len(bpe.ids) > _SIZE else max(len(bpe.fixed), len(bpe.ids) // 2)
    if not len(bpe.fixed) <= size < len(bpe.ids):
        raise InputError(
            f"size must be from {len(bpe.fixed)} (the bytes and added tokens of {path}) to"
            f" {len(bpe.ids) - 1}, got {size}"
        )
    counts = np.zeros(max(bpe.ids.values()) + 1, dtype=np.int64)
    characters = 0
    for texts in _iterate_texts(documents):
        counts += _count_tokens(teacher, texts, len(counts))
        characters += sum(map(len, texts))
    kept = sorted(bpe.select_tokens(counts, size), key=bpe.ids.__getitem__)
    new_ids = {token: id for id, token in enumerate(kept)}
    teacher_ids = [bpe.ids[token] for token in kept]
    tree["model"]["merges"] = [list(merge) for merge in bpe.select_merges(set(kept))]
    _renumber_tokens(tree, new_ids, str(path))
    text = json.dumps(tree, ensure_ascii=False, indent=2).encode()
    trimmed = _load_trimmed(text, teacher, new_ids, teacher_ids, str(path))

    vocabulary = {
        "schema": SCHEMA,
        "teacher_tokenizer": tokenizer_digest(tokenizer_dir),
        "tokenizer": blake3(text).hexdigest(),
        "teacher_ids": teacher_ids,
    }
    after = sum(
        int(_count_tokens(trimmed, texts, len(kept)).sum()) for texts in _iterate_texts(documents)
    )
    write_new(
        output,
        {
            **_renumber_companions(tokenizer_dir, new_ids),
            "tokenizer.json": [text],
            FILE: [json.dumps(vocabulary).encode()],
        },
    )
    return TrimResult(
        tokens=len(kept),
        teacher_tokens=len(bpe.ids),
        documents=len(documents),
        characters=characters,
        corpus_tokens=after,
        corpus_teacher_tokens=int(counts.sum()),
        covered_tokens=int(counts[teacher_ids].sum()),
    )


def _iterate_texts(documents: Documents) -> Iterator[list[str]]:
    """Yield the texts of a corpus in lists large enough for the library's threads."""
    batch: list[str] = []
    length = 0
    for document in documents:
        texts = [turn.content for turn in document.messages]
        texts += [text for text in (document.prompt, document.text) if text]
        batch += texts
        length += sum(map(len, texts))
        if length >= _BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _count_tokens(tokenizer: Tokenizer, texts: list[str], size: int) -> NDArray[np.int64]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = chain.from_iterable(encoding.ids for encoding in encodings)
    return np.bincount(np.fromiter(ids, dtype=np.int64), minlength=size)


def _renumber_tokens(tree: dict[str, Any], new_ids: Mapping[str, int], where: str) -> None:
    """Set the kept tokens' new ids everywhere in a parsed tokenizer.json."""
    vocab = tree["model"]["vocab"]
    tree["model"]["vocab"] = {token: id for token, id in new_ids.items() if token in vocab}
    for token in tree.get("added_tokens") or ():
        token["id"] = new_ids[token["content"]]
    try:
        _renumber_processor(tree.get("post_processor"), new_ids)
        if tree.get("padding"):
            tree["padding"]["pad_id"] = new_ids[tree["padding"]["pad_token"]]
    except KeyError as error:
        message = f"{where}: puts {error} around texts, which is not an added token"
        raise InputError(message) from None


def _renumber_processor(processor: Any, new_ids: Mapping[str, int]) -> None:
    kind = processor["type"] if processor else None
    if kind == "Sequence":
        for part in processor["processors"]:
            _renumber_processor(part, new_ids)
    elif kind == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new_ids[part] for part in token["tokens"]]
    elif kind in ("BertProcessing", "RobertaProcessing"):
        for end in ("sep", "cls"):
            token, _ = processor[end]
            processor[end] = [token, new_ids[token]]


def _load_trimmed(
    text: bytes,
    teacher: Tokenizer,
    new_ids: Mapping[str, int],
    teacher_ids: list[int],
    where: str,
) -> Tokenizer:
    """Open the new tokenizer as its readers do, and check that each token is the teacher's."""
    trimmed = Tokenizer.from_str(text.decode())
    trimmed.no_truncation()
    trimmed.no_padding()
    for token, teacher_id in zip(new_ids, teacher_ids, strict=True):
        if trimmed.token_to_id(token) != new_ids[token] or teacher.token_to_id(token) != teacher_id:
            raise InputError(f"{where}: numbers its tokens in an order that cannot be compacted")
    return trimmed


def _renumber_companions(folder: Path, new_ids: Mapping[str, int]) -> dict[str, list[bytes]]:
    """Return the files beside a tokenizer.json, by name, with the new ids."""
    names = [name for name in _AS_THEY_ARE if (folder / name).is_file()]
    names += template_files(folder).values()
    files = {name: [read_file(folder / name)] for name in names}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        settings: Any = json.loads(read_file(path))
        added = settings.get("added_tokens_decoder")
        if added:
            settings["added_tokens_decoder"] = {
                str(new_ids[token["content"]]): token
                for token in added.values()
                if token["content"] in new_ids
            }
        text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
        files[path.name] = [text.encode()]
    return files
