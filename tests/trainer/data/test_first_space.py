"""A completion goes on from its prompt: both together are one text, without a space between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from tests.trainer.data.spaced_tokenizer import KINDS, Kind, spaced_tokenizer, tokens_of
from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import IGNORED, Encoder, remove_first_space
from trainer.data.shapes import Sample

CASES = {
    "a word": ("once upon a", " time", ["▁time"]),
    "a part of a word": ("func", "tion", ["tion"]),
    "indentation": ("def f():\n", "    f", ["▁", "▁", "▁", "▁", "f"]),
    "a word after a space": ("a ", "tion", ["tion"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_completion_is_learned_as_a_model_writes_it(
    tmp_path: Path, case: str, kind: Kind
) -> None:
    """What the text of an answer is, gives the answer's tokens."""
    prompt, text, written = CASES[case]
    tokenizer = spaced_tokenizer(tmp_path / "m", kind)
    encoder = Encoder(tmp_path / "m")
    ids, labels = encoder.encode(Sample(text, prompt=prompt))
    asked = tokenizer.encode(prompt).ids
    new = tokens_of(tokenizer, *written)
    assert ids == [*asked, *new, *tokens_of(tokenizer, "</s>")]
    assert labels == [IGNORED] * len(asked) + ids[len(asked) :]
    assert tokenizer.decode(ids) == prompt + text
    assert encoder.answer_stream(Sample("", prompt=prompt), asked).finish(new) == text


def test_a_space_before_bytes_is_none_before_a_completion(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    tree = json.loads(path.read_text())
    level = tree["pre_tokenizer"] | {"add_prefix_space": True}
    digits = {"type": "Digits", "individual_digits": True}
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, level]}
    path.write_text(json.dumps(tree))
    encoder = Encoder(tmp_path)
    ids, _ = encoder.encode(Sample("b", prompt="a"))
    assert encoder.tokenizer.decode(ids) == " ab"


def test_a_tokenizer_that_adds_none_is_taken_as_it_is(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert remove_first_space(tokenizer) is tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="never")
    assert remove_first_space(tokenizer) is tokenizer


def test_all_else_of_a_tokenizer_stays(tmp_path: Path) -> None:
    tokenizer = spaced_tokenizer(tmp_path / "m")
    found = remove_first_space(tokenizer)
    assert found.get_vocab() == tokenizer.get_vocab()
    text = "a</s>func time é\n"
    assert tokenizer.encode(text).tokens[2:] == ["a", "</s>", "▁", *found.encode(text).tokens[3:]]
