"""A tokenizer in the manner of SentencePiece: a space before each text, and single bytes."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from string import ascii_letters
from typing import Literal

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["▁time", "func", "tion"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
Kind = Literal["normalizer", "metaspace"]
KINDS: list[Kind] = ["normalizer", "metaspace"]
"""Where the space comes from: Llama 2's published files have the one, or the other."""


def spaced_tokenizer(folder: Path, kind: Kind = "normalizer") -> Tokenizer:
    """Write a tokenizer of letters, bytes, `▁time` and `function`, and a config, and return it."""
    grown = [list(accumulate(word)) for word in WORDS]
    merges = [(a, b[len(a) :]) for word in grown for a, b in pairwise(word)] + [("func", "tion")]
    tokens = [*SPECIAL, *BYTES, "▁", *ascii_letters, "():", *(a + b for a, b in merges)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if kind == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    config = {"model_type": "llama", "vocab_size": len(vocabulary)}
    (folder / "config.json").write_text(json.dumps(config))
    return tokenizer


def tokens_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Return the numbers of tokens."""
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found, tokens
    return [number for number in found if number is not None]
