"""The tokenizer in a GGUF file as tokenizer.json and tokenizer_config.json.

A GGUF has the vocabulary and the merges. How text is cut before the merges is only named
(`tokenizer.ggml.pre`), so that name decides whether the tokenizer can be rebuilt exactly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trainer.system.errors import InputError
from trainer.system.regular_file import read_file

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Kinds of tokens in `tokenizer.ggml.token_type`."""
_SPACE = "▁"  # SentencePiece writes a space so
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level tokenizer cuts text before its merges."""

    pattern: str | None = None
    """None for GPT-2's own, which the ByteLevel step has built in."""
    digits: bool = False
    """Each digit is a piece."""
    nfc: bool = False
    whole_words: bool = False
    """A piece that is in the vocabulary is taken without merges."""
    begins: bool = False
    """A text begins with the token of that name, unless the file says otherwise."""


_LLAMA3 = _PreTokenizer(_WORDS % "{1,3}" + _REST, whole_words=True, begins=True)
_CUTS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(digits=True),
    "qwen2": _PreTokenizer(_WORDS % "" + _REST, nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""By `tokenizer.ggml.pre`, as the publishers' tokenizer.json have it."""


def tokenizer_files(metadata: Mapping[str, Any], path: Path, length: int) -> dict[str, str]:
    """Return the text of each file of the tokenizer.

    One whose cutting is unknown is taken from a tokenizer.json beside the GGUF.

    Args:
        metadata: the values below `tokenizer.`, keys without it.
        length: tokens of the longest text.

    Raises:
        InputError: it cannot be rebuilt exactly.
    """
    tokens: Sequence[str] = metadata.get("ggml.tokens") or ()
    if not tokens or len(set(tokens)) != len(tokens):
        raise InputError(f"{path}: contains no usable tokenizer; give its original model folder")
    tree = _make_tokenizer_json(metadata, path)
    if tree is None:
        tree = _read_sibling_tokenizer(path, _pre_tokenizer_name(metadata))
    text = json.dumps(tree, ensure_ascii=False)
    _prove_equal(text, metadata, path)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _begins_with_bos(metadata),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := metadata.get(f"ggml.{key}_token_id")) is not None:
            settings[f"{name}_token"] = tokens[token]
    if template := metadata.get("chat_template"):
        settings["chat_template"] = template
    if with_tools := metadata.get("chat_template.tool_use"):
        named = {"default": template, "tool_use": with_tools}
        settings["chat_template"] = [
            {"name": name, "template": text} for name, text in named.items() if text
        ]
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(settings, indent=2)}


def _pre_tokenizer_name(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("ggml.pre", metadata.get("ggml.model")))


def _begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a text begins with the token `bos`."""
    sentencepiece = metadata.get("ggml.model") == "llama"
    usual = sentencepiece or _CUTS.get(_pre_tokenizer_name(metadata), _PreTokenizer()).begins
    return bool(metadata.get("ggml.add_bos_token", usual)) and "ggml.bos_token_id" in metadata


def _make_tokenizer_json(metadata: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the content of tokenizer.json; None if the cutting is not known."""
    kind, tokens = metadata.get("ggml.model"), metadata["ggml.tokens"]
    if kind == "llama":
        parts = _make_sentencepiece(metadata, tokens)
    elif kind == "gpt2" and _pre_tokenizer_name(metadata) in _CUTS:
        parts = _byte_level(metadata, _CUTS[_pre_tokenizer_name(metadata)])
    elif kind in ("llama", "gpt2"):
        return None
    else:
        raise InputError(
            f"{path}: a tokenizer of the kind {kind!r} is not supported; give the original model"
            " folder"
        )
    kinds: Sequence[int] = metadata.get("ggml.token_type") or [1] * len(tokens)
    # Padding up to the model's rows, which the publisher's tokenizer does not have.
    vocabulary = {
        token: number
        for number, token in enumerate(tokens)
        if kinds[number] != _UNUSED or token != f"[PAD{number}]"
    }
    added = [
        {
            **{"id": number, "content": token, "special": kinds[number] == _CONTROL},
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
        for token, number in vocabulary.items()
        if kinds[number] in (_CONTROL, _USER_DEFINED)
    ]
    ends = bool(metadata.get("ggml.add_eos_token")) and "ggml.eos_token_id" in metadata
    model = {"type": "BPE", "dropout": None, "vocab": vocabulary, **parts.pop("model")}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "post_processor": _make_template_step(
            metadata, first=_begins_with_bos(metadata), last=ends
        ),
        **parts,
        "model": model,
    }


def _byte_level(metadata: Mapping[str, Any], cut: _PreTokenizer) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps: list[dict[str, Any]] = []
    if cut.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if cut.pattern is not None:
        pattern = {"Regex": cut.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({**level, "use_regex": cut.pattern is None})
    return {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**level, "use_regex": True},
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut.whole_words,
            "merges": [merge.split(" ") for merge in metadata.get("ggml.merges") or ()],
        },
    }


def _make_sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    ]
    undo: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if metadata.get("ggml.add_space_prefix", True):
        steps.insert(0, {"type": "Prepend", "prepend": _SPACE})
        undo.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": undo},
        "model": {
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": _merges_of_scores(tokens, metadata["ggml.scores"]),
        },
    }


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Return the merges that a SentencePiece BPE implies: each pair that makes a token.

    A token with a higher score is made first; the pairs of one token are in the order of their
    tokens.
    """
    numbers = {token: number for number, token in enumerate(tokens)}
    merges: list[list[str]] = []
    for number in sorted(range(len(tokens)), key=lambda number: -scores[number]):
        token = tokens[number]
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in numbers and pair[1] in numbers]
        known.sort(key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))
        merges += map(list, known)
    return merges


def _make_template_step(
    metadata: Mapping[str, Any], *, first: bool, last: bool
) -> dict[str, Any] | None:
    """Return the step that puts the tokens `bos` and `eos` around a text."""
    if not first and not last:
        return None
    tokens = metadata["ggml.tokens"]
    begin: Any = metadata.get("ggml.bos_token_id")
    end: Any = metadata.get("ggml.eos_token_id")
    around = [token for token, wanted in ((begin, first), (end, last)) if wanted]

    def build_sequence(letter: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": kind}}

        def build_special(token: int) -> dict[str, Any]:
            return {"SpecialToken": {"id": tokens[token], "type_id": kind}}

        return [
            *([build_special(begin)] if first else []),
            text,
            *([build_special(end)] if last else []),
        ]

    return {
        "type": "TemplateProcessing",
        "single": build_sequence("A", 0),
        "pair": [*build_sequence("A", 0), *build_sequence("B", 1)],
        "special_tokens": {
            tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
            for token in around
        },
    }


def _read_sibling_tokenizer(path: Path, name: str) -> dict[str, Any]:
    """Return the tokenizer.json of a GGUF's folder, for a cutting that is not known."""
    beside = path.with_name("tokenizer.json")
    try:
        return json.loads(read_file(beside))
    except FileNotFoundError:
        raise InputError(
            f"{path}: its tokenizer cuts text as {name!r}, which is not supported; put the"
            " publisher's tokenizer.json beside the file"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{beside}: cannot be read: {error}") from None


def _prove_equal(text: str, metadata: Mapping[str, Any], path: Path) -> None:
    """Check that every token of the file has its id, and every added one its own piece.

    Raises:
        InputError: names a token that has not.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"{path}: not a usable tokenizer: {error}") from None
    kinds = metadata.get("ggml.token_type") or [1] * len(metadata["ggml.tokens"])
    for number, (token, kind) in enumerate(zip(metadata["ggml.tokens"], kinds, strict=True)):
        if kind == _UNUSED and tokenizer.token_to_id(token) is None:
            continue
        whole = kind not in (_CONTROL, _USER_DEFINED) or tokenizer.encode(
            token, add_special_tokens=False
        ).ids == [number]
        if tokenizer.token_to_id(token) != number or not whole:
            raise InputError(
                f"{path}: the tokenizer does not give {token!r} the id {number}; put the"
                " publisher's tokenizer.json beside the file"
            )
