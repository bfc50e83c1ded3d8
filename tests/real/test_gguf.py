"""The tokenizer that a GGUF file describes is the one that its publisher ships."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests import ROOT
from tests.real.conftest import folder_of
from tests.real.packages import TOKENIZERS
from tests.trainer.gguf_files import described_tokenizer
from trainer.checkpoint.trained_model import load_trained
from trainer.model.gguf.tokenizer import tokenizer_files

pytestmark = pytest.mark.real


def texts() -> list[str]:
    """Return prose, code, and characters at random, among them what tokenizers treat apart."""
    found = [p.read_text() for p in (ROOT / "README.md", *ROOT.glob("trainer/model/*.py"))]
    pieces = [piece for text in found for piece in text.split("\n\n")]
    drawn = random.Random(1)
    ranges = (range(32, 127), range(160, 0x600), range(0x4E00, 0x9FFF), range(0x1F600, 0x1F640))
    for _ in range(200):
        pieces.append("".join(chr(drawn.choice(drawn.choice(ranges))) for _ in range(40)))
    return [
        *pieces,
        "",
        " ",
        "a\n\n\n b\t\tc",
        "12345 ½ ٣٤ x²",
        "don't I'LL",
        "cafe\u0301 <s>x</s>",
    ]


@pytest.mark.parametrize(
    ("name", "pre", "more"),
    [
        ("qwen3", "qwen2", {}),
        ("llama3", "llama-bpe", {"tokenizer.ggml.add_bos_token": False}),
        ("gpt2", "gpt-2", {}),
        ("llama2", None, {"tokenizer.ggml.model": "llama"}),
    ],
)
def test_ids_are_the_publishers(
    tmp_path: Path, name: str, pre: str | None, more: dict[str, Any]
) -> None:
    folder = folder_of(TOKENIZERS[name]) / "package" / "models"
    tree = json.loads((folder / "tokenizer.json").read_bytes())
    tokens = [*tree["model"]["vocab"], *(token["content"] for token in tree["added_tokens"])]
    described = described_tokenizer(folder, len(set(tokens)), pre or "default") | more
    if pre is None:  # SentencePiece has scores where others have merges: a rank for each piece
        ranks: dict[str, float] = {}
        for merge in described.pop("tokenizer.ggml.merges"):
            ranks.setdefault(merge.replace(" ", ""), -float(len(ranks)))
        pieces = described["tokenizer.ggml.tokens"]
        described["tokenizer.ggml.scores"] = [ranks.get(piece, -1e9) for piece in pieces]
    values = {key.removeprefix("tokenizer."): value for key, value in described.items()}
    ours = Tokenizer.from_str(tokenizer_files(values, tmp_path / "m.gguf", 9)["tokenizer.json"])
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids)


def test_a_published_file_is_a_model(smollm2_gguf: Path) -> None:
    trained = load_trained(smollm2_gguf)
    tokenizer = Tokenizer.from_file(str(trained.base_dir / "tokenizer.json"))
    # Each digit is a token, as the publisher trained it; spaces before words are part of them.
    assert tokenizer.encode(" 2024 in").tokens == ["Ġ", "2", "0", "2", "4", "Ġin"]
    assert trained.layout.size == 134_515_008
