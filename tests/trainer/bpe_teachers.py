"""Tokenizers of the shapes that teachers have, trained here on the standard library's sources."""

from __future__ import annotations

import asyncio
import email
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from trainer.data.documents import Documents
from trainer.init_model import tokenizer_config, train_tokenizer

TEACHER_SIZE = 4000
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MARKUP = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def corpus() -> Documents:
    return Documents([Path(email.__file__).parent])


def everything() -> Iterator[str]:
    """Yield more than the corpus, as a teacher's training had."""
    folders = [Path(asyncio.__file__).parent, Path(email.__file__).parent]
    return (document.text for document in Documents(folders))


@cache
def _plain() -> Tokenizer:
    return train_tokenizer(everything(), TEACHER_SIZE)


def plain(folder: Path) -> None:
    """As `trainer init-model` makes them: the special tokens come first, inside the model."""
    _plain().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(json.dumps(tokenizer_config(512)).encode())


def like_qwen(folder: Path) -> None:
    """NFC, one regular expression, added tokens behind the model's, merges as strings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer)
    tokenizer.add_special_tokens([AddedToken(token) for token in MARKUP])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.enable_padding(pad_id=tokenizer.token_to_id(MARKUP[0]), pad_token=MARKUP[0])
    tree = json.loads(tokenizer.to_str())
    tree["model"]["merges"] = [" ".join(merge) for merge in tree["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in tree["added_tokens"]
        },
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def like_llama(folder: Path) -> None:
    """Whole words are looked up first, every split of a token is a merge, a BOS is put first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tree = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = tree["model"]["vocab"]
    tree["model"]["ignore_merges"] = True
    tree["model"]["merges"] = [
        [token[:cut], token[cut:]]
        for token in sorted(vocab, key=vocab.__getitem__)
        for cut in sorted(
            range(1, len(token)),
            key=lambda cut, token=token: (vocab.get(token[:cut], 0), vocab.get(token[cut:], 0)),
        )
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    begin = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)]
            ),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def train(tokenizer: Tokenizer) -> None:
    tokenizer.train_from_iterator(
        everything(),
        trainers.BpeTrainer(
            vocab_size=TEACHER_SIZE,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
