"""The pieces of a text that streams are whole characters, and together the whole text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.text_stream import TextStream

TEXTS = ["plain", "naïve 🙂👩‍👧 日本\n\n x", "a\ufffdb", "\nuser", "a\nuser: b", "a\nuse\nuser: "]


@pytest.mark.parametrize("marker", ["", "\nuser: "])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_never_change(tmp_path: Path, text: str, marker: str) -> None:
    """One token a byte, so that every character of several bytes is cut."""
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    stream, pieces = TextStream(tokenizer, marker), list[str]()
    for count in range(1, len(tokens) + 1):
        pieces.append(stream.push(tokens[:count]))
        assert len(pieces[-1]) <= 8, "handed out as they come"
        if stream.ended:
            break
    pieces.append(stream.finish(tokens))
    expected = text.partition(marker)[0] if marker else text
    assert "".join(pieces) == stream.text == expected
    assert stream.ended == (bool(marker) and marker in text)


def test_half_a_character_at_the_end_is_shown(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = tokenizer.encode("a🙂", add_special_tokens=False).ids[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(tokens) == "a"
    assert stream.finish(tokens) == "\ufffd"
