"""The pieces of a text that streams are whole characters, and together the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.spaced_tokenizer import BYTES, KINDS, Kind, spaced_tokenizer, tokens_of
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
    stream, pieces = TextStream(tokenizer, markers=[marker]), list[str]()
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


ANSWERS = [
    ["▁time"],
    ["tion", "▁time"],
    ["▁", "▁", "▁", "▁", "f", *(BYTES[byte] for byte in "\n  é🙂".encode())],
    [*(BYTES[byte] for byte in "日本".encode()), "▁time"],
    ["</s>", "▁time"],
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("prompt", ["once upon a", "func", "def f():\n", "日", "a "])
def test_a_text_goes_on_from_what_precedes_it(
    tmp_path: Path, prompt: str, answer: list[str], kind: Kind
) -> None:
    """Its first space stays, which the tokenizer omits at the beginning of what it decodes."""
    tokenizer = spaced_tokenizer(tmp_path / "m", kind)
    asked, new = tokenizer.encode(prompt).ids, tokens_of(tokenizer, *answer)
    whole = tokenizer.decode(asked[1:] + new, skip_special_tokens=False)
    stream = TextStream(tokenizer, asked)
    pieces = [stream.push(new[: count + 1]) for count in range(len(new))]
    assert prompt + "".join(pieces) + stream.finish(new) == prompt + stream.text == whole
    at_once = TextStream(tokenizer, asked)
    assert prompt + at_once.finish(new) == whole


def test_a_text_of_its_own_begins_without_a_space(tmp_path: Path) -> None:
    """Also after an added token, where the tokenizer begins one."""
    tokenizer = spaced_tokenizer(tmp_path / "m")
    for before in ([], tokens_of(tokenizer, "<s>"), tokens_of(tokenizer, "<s>", "func", "</s>")):
        stream = TextStream(tokenizer, before)
        assert stream.finish(tokens_of(tokenizer, "▁time", "▁time")) == "time time"


def test_half_a_character_spoils_none_before_it(tmp_path: Path) -> None:
    """A run of single bytes that is no text is decoded to marks alone."""
    tokenizer = spaced_tokenizer(tmp_path / "m")
    tokens = tokens_of(tokenizer, *(BYTES[byte] for byte in "日本語".encode()))[:-1]
    stream = TextStream(tokenizer, tokenizer.encode("日").ids)
    assert stream.push(tokens) == "日本"
    assert stream.finish(tokens) == "\ufffd\ufffd"


def test_the_first_of_several_markers_ends_a_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokens = tokenizer.encode("abcdef", add_special_tokens=False).ids
    stream = TextStream(tokenizer, markers=["ef", "cx", "cd"])
    assert [stream.push(tokens[:count]) for count in (1, 2, 3, 4)] == ["a", "b", "", ""]
    assert stream.ended
    assert stream.finish(tokens) == ""
    assert TextStream(tokenizer, markers=["ef", "cd"]).finish(tokens) == "ab"


def test_each_token_is_decoded_a_few_times(tmp_path: Path) -> None:
    """Of a long answer as of a short one, and so are a long prompt's."""
    tokenizer = spaced_tokenizer(tmp_path / "m")
    decoded = 0

    class Counting:
        def get_added_tokens_decoder(self) -> Any:
            return tokenizer.get_added_tokens_decoder()

        def decode(self, tokens: Sequence[int], **settings: Any) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return tokenizer.decode(list(tokens), **settings)

    counting: Any = Counting()
    asked = tokenizer.encode("once upon a " * 90).ids
    new = tokenizer.encode("time é " * 200, add_special_tokens=False).ids
    stream = TextStream(counting, asked, ["never"])
    for count in range(1, len(new) + 1):
        stream.push(new[:count])
    stream.finish(new)
    assert decoded <= 3 * len(asked) + 8 * len(new)
