"""Long conversations lose whole turns and lines of their oldest part, never the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.datasets import load_dataset
from tests.trainer.data.families import FAMILIES
from tests.trainer.data.test_chat_template import write_model
from tests.trainer.data.test_tokens import byte_tokenizer, write
from trainer.data.encoder import IGNORED, Encoder
from trainer.data.shapes import ChatMessage, Sample
from trainer.data.truncation import encode_truncated, fit_conversation


def said(*turns: tuple[str, str]) -> Sample:
    return Sample("", messages=tuple(ChatMessage(role, text) for role, text in turns))


def texts(sample: Sample | None) -> list[str]:
    assert sample is not None
    return [message.content for message in sample.messages]


def size(sample: Sample) -> int:
    return sum(len(message.content) for message in sample.messages)


CHAT = said(
    ("system", "S" * 10),
    ("user", "a" * 10),
    ("assistant", "b" * 10),
    ("user", "c" * 10),
    ("tool", "t" * 10),
    ("assistant", "d" * 10),
    ("user", "e" * 10),
    ("assistant", "f" * 10),
)


@pytest.mark.parametrize(
    ("limit", "left"),
    [(80, "SabctdeF"), (79, "Sctdef"), (60, "Sctdef"), (59, "Sef"), (30, "Sef"), (29, None)],
)
def test_the_oldest_exchanges_go_first_and_the_system_turn_stays(limit, left):
    fitted = fit_conversation(CHAT, size, limit)
    assert (fitted and "".join(text[0] for text in texts(fitted)).lower()) == (
        left and left.lower()
    )


def test_the_last_exchange_with_an_answer_stays():
    chat = said(("user", "a" * 9), ("assistant", "b" * 9), ("user", "dangling!"))
    assert texts(fit_conversation(chat, size, 27)) == texts(chat)
    assert fit_conversation(chat, size, 26) is None, "without the answer there is nothing to learn"


LINES = [f"P{number}: said {number}" for number in range(8)]
TRANSCRIPT = "\n".join(LINES)
HEAD = "Present: P0 to P7"
ASK = "Sum it up."


@pytest.mark.parametrize(
    ("asked", "left"),
    [
        (f"{HEAD}\n\n{TRANSCRIPT}\n\n{ASK}", HEAD + "\n\n{}\n\n" + ASK),
        (f"{ASK}\n\n{HEAD}\n\n{TRANSCRIPT}", ASK + "\n\n" + HEAD + "\n\n{}"),
        (f"{TRANSCRIPT}\n\n{ASK}", "{}\n\n" + ASK),
        (f"{ASK}\n\n{TRANSCRIPT}", ASK + "\n\n{}"),
        (TRANSCRIPT, "{}"),
    ],
)
def test_lines_of_a_transcript_go_oldest_first_wherever_the_instruction_is(asked, left):
    sample = said(("user", asked), ("assistant", "Much was said."))
    for kept in range(1, 9):
        expected = left.format("\n".join(LINES[-kept:]))
        fitted = fit_conversation(sample, size, len(expected) + len("Much was said."))
        assert texts(fitted) == [expected, "Much was said."]
    assert fit_conversation(sample, size, len(left) - 2 + len("Much was said.")) is None


def test_turns_between_blank_lines_are_a_transcript_too():
    asked = "\n\n".join([ASK, *LINES, "That was all."])
    sample = said(("user", asked), ("assistant", "x"))
    expected = "\n\n".join([ASK, *LINES[5:], "That was all."])
    assert texts(fit_conversation(sample, size, len(expected) + 1)) == [expected, "x"]


def test_exchanges_go_before_lines():
    sample = said(
        ("user", "old"), ("assistant", "answer"), ("user", TRANSCRIPT), ("assistant", "new")
    )
    assert texts(fit_conversation(sample, size, len(TRANSCRIPT) + 3)) == [TRANSCRIPT, "new"]
    assert texts(fit_conversation(sample, size, len(TRANSCRIPT) + 2)) == [
        "\n".join(LINES[1:]),
        "new",
    ]


def rows(*answers: str) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": f"{TRANSCRIPT}\n\n{ASK}"}
    return [{"messages": [asked, {"role": "assistant", "content": answer}]} for answer in answers]


def test_the_answer_is_learned_whole_and_what_does_not_fit_is_left_out(tmp_path: Path):
    tokenizer = byte_tokenizer(tmp_path)
    path = write(tmp_path / "a.jsonl", *rows("Much was said.", "x" * 200))
    data = load_dataset(path, tmp_path, "causal-lm", None, max_seq_len=100)
    fits, dropped = data[0], data[1]
    assert isinstance(fits.labels, np.ndarray)
    assert isinstance(dropped.labels, np.ndarray)
    assert len(fits.input_ids) <= 100
    text = tokenizer.decode(fits.input_ids.tolist(), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nP4: said 4\n")
    learned = fits.labels[fits.labels != IGNORED].tolist()
    assert tokenizer.decode(learned, skip_special_tokens=False) == "Much was said.<|im_end|>"
    assert dropped.labels.tolist() == [IGNORED], "it costs next to nothing and counts nothing"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_templates_express_what_is_left(tmp_path: Path, name: str):
    write_model(tmp_path, FAMILIES[name], FAMILIES[name].marked)
    encoder = Encoder(tmp_path)
    turns = [("user", TRANSCRIPT), ("assistant", "first"), ("user", TRANSCRIPT), ("assistant", "z")]
    whole, _ = encoder.encode_conversation(said(*turns))
    one, _ = encoder.encode_conversation(said(*turns[2:]))
    ids, labels = encode_truncated(encoder, said(*turns), len(whole) - 1)
    assert ids == one
    ids, labels = encode_truncated(encoder, said(*turns), len(one) - 1)
    expected = encoder.encode_conversation(said(("user", "\n".join(LINES[1:])), ("assistant", "z")))
    assert (ids, labels) == expected


def weighed(*turns: tuple[str, str, bool]) -> Sample:
    return Sample("", messages=tuple(ChatMessage(*turn[:2], learned=turn[2]) for turn in turns))


def test_what_is_left_has_an_answer_to_learn_and_context_stays_context():
    chat = weighed(
        ("user", "a" * 10, True),
        ("assistant", "b" * 10, False),
        ("user", "c" * 10, True),
        ("assistant", "d" * 10, True),
        ("user", "e" * 10, True),
        ("assistant", "f" * 10, False),
    )
    fitted = fit_conversation(chat, size, 59)
    assert fitted is not None
    assert fitted.messages == chat.messages[2:], "the last answer to learn is not the last answer"
    assert fit_conversation(chat, size, 29) is None


def test_lines_of_an_answer_are_never_cut():
    chat = said(("system", "s"), ("assistant", TRANSCRIPT), ("user", "x"))
    assert texts(fit_conversation(chat, size, size(chat))) == texts(chat)
    assert fit_conversation(chat, size, size(chat) - 1) is None


def test_a_reasoning_is_cut_with_its_turn_alone(tmp_path: Path):
    """The earlier one, which the template drops, is context; the last stays whole."""
    write_model(tmp_path, FAMILIES["qwen3"], FAMILIES["qwen3"].plain)
    encoder = Encoder(tmp_path)
    thought = {"reasoning_content": "Let me see."}
    answer = ChatMessage("assistant", "first", thought, learned=False)
    last = replace(answer, content="z", learned=True)
    asked = ChatMessage("user", TRANSCRIPT)
    chat = Sample("", messages=(asked, answer, asked, last))
    one = encoder.encode_conversation(replace(chat, messages=(asked, last)))
    assert encode_truncated(encoder, chat, len(one[0])) == one
    ids, labels = encode_truncated(encoder, chat, len(one[0]) - 1)
    assert len(ids) < len(one[0])
    assert [x for x in labels if x != IGNORED] == [x for x in one[1] if x != IGNORED]
