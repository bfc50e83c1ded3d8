"""The text of an answer is what its tokens say after the prompt, in whole characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.spaced_tokenizer import BYTES, spaced_tokenizer, tokens_of
from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import Encoder
from trainer.distill.answers.answer import Answer
from trainer.distill.answers.author import AnswerSlot, Author, Prompts
from trainer.replica.sampling import Sampling, ScoredSampling

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[/I]"
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def answers(
    model: Path, prompts: Sequence[Any], new: Sequence[Sequence[int]], stops: Sequence[str] = ()
) -> list[Answer]:
    """Return what an author makes of tokens that a model gives, as far as it is not told to end."""

    def generate(prompts: Any, *, sampling: Any, until: Any = None, **_: Any) -> list[list[int]]:
        assert isinstance(sampling, ScoredSampling)
        made: list[list[int]] = [[] for _ in prompts]
        for row, tokens in enumerate(new):
            for place, token in enumerate(tokens):
                sampling.logprobs[row, place] = -1.0
                made[row].append(token)
                if until(row, made[row]):
                    break
        return made

    path = model / "prompts.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in prompts))
    author = Author(generate, Prompts.read_prompts(path, {}, model), Sampling(), 9, stops)
    return author.write_answers([AnswerSlot(row, 0, row, row) for row in range(len(new))])


def test_the_first_space_of_an_answer_stays(tmp_path: Path) -> None:
    tokenizer = spaced_tokenizer(tmp_path / "m")
    prompts = [{"text": "once upon a"}, {"text": "func"}, {"text": "def f():\n"}]
    new = [
        tokens_of(tokenizer, "▁time", "</s>"),
        tokens_of(tokenizer, "tion", "▁time"),
        tokens_of(tokenizer, "▁", "▁", "▁", "▁", "f"),
    ]
    found = answers(tmp_path / "m", prompts, new)
    assert [each.text for each in found] == [" time", "tion time", "    f"]
    assert [each.ended for each in found] == [True, False, False]


@pytest.mark.parametrize(("template", "text"), [(TEMPLATE, " time"), (None, "time")])
def test_the_space_of_a_turn_is_as_the_turns_are_laid_out(
    tmp_path: Path, template: str | None, text: str
) -> None:
    """A template makes one text of all turns; without one the tokenizer begins a text a turn."""
    folder = tmp_path / "m"
    tokenizer = spaced_tokenizer(folder)
    if template is not None:
        settings = {"eos_token": "</s>", "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (found,) = answers(folder, [CHAT], [tokens_of(tokenizer, "▁time", "</s>")])
    assert found.text == text


def test_a_text_ends_an_answer_that_it_follows(tmp_path: Path) -> None:
    tokenizer = spaced_tokenizer(tmp_path / "m")
    new = tokens_of(tokenizer, "tion", "▁time", "a", "f")
    (found,) = answers(tmp_path / "m", [{"text": "func"}], [new], stops=[" timea", "x"])
    assert (found.text, found.ended) == ("tion", True)
    assert found.tokens[found.prompt_length :].tolist() == new[:3]


@pytest.mark.parametrize(("text", "cut"), [("hé", 1), ("日本🙂", 1), ("日本🙂", 3)])
@pytest.mark.parametrize("spaced", [False, True])
def test_half_a_character_at_the_end_is_no_text(
    tmp_path: Path, text: str, cut: int, spaced: bool
) -> None:
    """Its tokens stay, and the characters before it."""
    folder = tmp_path / "m"
    if spaced:
        tokenizer = spaced_tokenizer(folder)
        new = tokens_of(tokenizer, *(BYTES[byte] for byte in text.encode()))[:-cut]
    else:
        byte_tokenizer(folder)
        (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
        new = Encoder(folder).tokenizer.encode(text).ids[:-cut]
    (found,) = answers(folder, [{"text": "a"}], [new])
    assert found.text == text[:-1]
    assert found.tokens[found.prompt_length :].tolist() == new


def test_an_answer_that_the_model_ended_is_not_cut(tmp_path: Path) -> None:
    tokenizer = spaced_tokenizer(tmp_path / "m")
    new = tokens_of(tokenizer, "f", *(BYTES[byte] for byte in "\ufffd".encode()), "</s>")
    (found,) = answers(tmp_path / "m", [{"text": "a"}], [new])
    assert found.text == "f\ufffd"
