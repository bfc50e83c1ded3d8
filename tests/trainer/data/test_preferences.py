"""Preferences as TRL and others publish them: two answers to a prompt, as texts or as turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.datasets import load_dataset
from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import Encoder
from trainer.data.lengths import measure_lengths
from trainer.data.measurement import measure_samples
from trainer.data.records import DataError
from trainer.data.samples import read_file
from trainer.data.shapes import Sample, parse_sample
from trainer.data.values import BadLineError

ASK = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
TEXTS = {"prompt": "q: ", "chosen": "good", "rejected": "bad"}
TURNS = {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}
WHOLE = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
ULTRAFEEDBACK = WHOLE | {"prompt": "q", "messages": [ASK, GOOD], "score_chosen": 8.0}


def parse(**tree: Any) -> Sample:
    return parse_sample(json.loads(json.dumps(tree)), 1, pairs=True)


def test_texts_and_turns_are_completions_of_one_prompt() -> None:
    sample = parse(**TEXTS)
    assert [(each.prompt, each.text) for each in sample.answers] == [
        ("q: ", "good"),
        ("q: ", "bad"),
    ]
    for tree in (TURNS, WHOLE, ULTRAFEEDBACK):
        found = [[(t.content, t.target) for t in each.messages] for each in parse(**tree).answers]
        assert found == [[("q", False), (said, True)] for said in ("good", "bad")]
    assert parse(**TURNS).digest() == parse(**ULTRAFEEDBACK).digest()
    assert parse(**TURNS).digest() != parse(**{**TURNS, "rejected": [ASK, BAD]}).digest()
    with_rules = parse(**TURNS, system="s", tools=[{"name": "clock"}])
    assert all(each.messages[0].content == "s" and each.tools for each in with_rules.answers)


def test_what_both_conversations_begin_with_is_context() -> None:
    sample = parse(chosen=[ASK, BAD, ASK, GOOD], rejected=[ASK, BAD, ASK, BAD])
    assert [[t.target for t in each.messages] for each in sample.answers] == [
        [False, False, False, True]
    ] * 2


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


HUMAN = {"from": "human", "value": "q"}
ANSWERS = {"chosen": "good", "rejected": "bad"}
ONE_TURN = {"chosen": [GOOD], "rejected": [BAD]}
DIALOGUE = "\n\nHuman: q\n\nAssistant: "
HH = "\n\nHuman: q\n\nAssistant: a, b\n\nHuman: and\nmore?\n\nAssistant: "
LONG = [("user", "q"), ("assistant", "a, b"), ("user", "and\nmore?")]
WHOLE_HH = {"chosen": HH + "good", "rejected": HH + "bad"}


@pytest.mark.parametrize(
    ("tree", "asked"),
    [
        ({"conversations": [HUMAN], "chosen": gpt("good"), "rejected": gpt("bad")}, "q"),
        ({"conversations": [HUMAN], "chosen": [gpt("good")], "rejected": [gpt("bad")]}, "q"),
        ({"conversations": [HUMAN], **ANSWERS}, "q"),
        ({"messages": [ASK], "chosen": GOOD, "rejected": BAD}, "q"),
        ({"messages": [ASK], **ONE_TURN}, "q"),
        ({"instruction": "q", "input": "", "history": [], **ANSWERS}, "q"),
        ({"instruction": "q", "input": "i", **ANSWERS}, "q\n\ni"),
        ({"question": "q", **ANSWERS}, "q"),
        ({"input": "q", **ANSWERS}, "q"),
        ({"question": "q", **ONE_TURN}, "q"),
        ({"prompt": "q", **ONE_TURN}, "q"),
        ({"prompt": "q", "system": "", **ANSWERS}, "q"),
        ({"prompt": "q", "system": None, **ANSWERS}, "q"),
        ({"prompt": "q", "tools": None, **ANSWERS}, "q"),
        ({"prompt": [ASK], **ANSWERS}, "q"),
        ({"prompt": ASK, **ONE_TURN}, "q"),
        ({"prompt": [HUMAN], "chosen": gpt("good"), "rejected": gpt("bad")}, "q"),
        ({"prompt": [ASK], **WHOLE}, "q"),
        ({"prompt": "q", "messages": [ASK, GOOD], **WHOLE}, "q"),
        (
            {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "Human: q\n\nAssistant: bad"},
            "q",
        ),
    ],
)
def test_published_preferences_are_answers_to_one_question(
    tree: dict[str, Any], asked: str
) -> None:
    found = [[(t.role, t.content, t.target) for t in e.messages] for e in parse(**tree).answers]
    assert found == [
        [("user", asked, False), ("assistant", said, True)] for said in ("good", "bad")
    ]
    with_rules = parse(**{**tree, "system": "s"})
    assert [each.messages[0].content for each in with_rules.answers] == ["s", "s"]


@pytest.mark.parametrize(
    "tree",
    [
        WHOLE_HH,
        {"instruction": "and\nmore?", "history": [["q", "a, b"]], **ANSWERS},
        {"conversations": [HUMAN, gpt("a, b"), {**HUMAN, "value": "and\nmore?"}], **ANSWERS},
    ],
)
def test_earlier_rounds_are_context(tree: dict[str, Any]) -> None:
    for answer, said in zip(parse(**tree).answers, ("good", "bad"), strict=True):
        turns = [(turn.role, turn.content) for turn in answer.messages]
        assert turns == [*LONG, ("assistant", said)]
        assert [turn.target for turn in answer.messages] == [False, False, False, True]


@pytest.mark.parametrize(
    ("tree", "prompt", "answers"),
    [
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is black."},
            "The sky is",
            [" blue.", " black."],
        ),
        ({"chosen": "Q: x\nA: yes", "rejected": "Q: x\nA: no"}, "Q: x\nA:", [" yes", " no"]),
        (
            {"prompt": "The sky", "chosen": "The sky is", "rejected": "The sky was"},
            "The sky",
            [" is", " was"],
        ),
        ({"prompt": "q", "chosen": "queue", "rejected": "b"}, "q", ["queue", "b"]),
        ({"prompt": "q", "chosen": "\n\nHuman: x", "rejected": "b"}, "q", ["\n\nHuman: x", "b"]),
    ],
)
def test_texts_that_begin_with_their_prompt(
    tree: dict[str, Any], prompt: str, answers: list[str]
) -> None:
    found = parse(**tree).answers
    assert [each.prompt for each in found] == [prompt, prompt]
    assert [each.text for each in found] == answers


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"prompt": "q", "completion": "a"}, "lacks the key 'chosen', and has 'prompt', 'compl"),
        ({"question": "q", "response_j": "a", "response_k": "b"}, "name them with data.columns"),
        ({"chosen": "a", "rejected": "b"}, "are texts, and there is no 'prompt'"),
        ({"chosen": "It is", "rejected": "It's"}, "are texts, and there is no 'prompt'"),
        ({"system": "s", **ANSWERS}, "has nothing that 'chosen' and 'rejected' answer"),
        (ONE_TURN, "has nothing that 'chosen' and 'rejected' answer"),
        ({**TEXTS, "rejected": "good"}, "'chosen' and 'rejected' are the same: none is better"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [GOOD]}, "are the same"),
        ({**TEXTS, "rejected": [BAD]}, "must both be texts, or both be turns"),
        ({**WHOLE, "prompt": "another"}, "'prompt' is not a turn that both"),
        ({**WHOLE, "question": "another"}, "'question' is not a turn that both"),
        ({"prompt": "q", "question": "q", **ANSWERS}, "has 'prompt' and 'question', and one"),
        ({"prompt": [ASK, GOOD], **ONE_TURN}, "'prompt' ends with an answer"),
        ({"conversations": [HUMAN, gpt("good")], **ANSWERS}, "'conversations' ends with an answer"),
        ({"chosen": HH, "rejected": HH + "bad"}, "a dialogue that does not end with an answer"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "'rejected' has no assistant turn"),
        ({**TEXTS, "image": "a.png"}, "'image' is not text"),
        ({**TEXTS, "weight": 2}, "'weight' weighs a whole line"),
    ],
)
def test_what_is_no_preference_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadLineError) as caught:
        parse(**tree)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_answer_has_its_tokens_and_is_cut_at_its_end(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    rows = [{**TEXTS, "mood": 1}, TURNS, {**TEXTS, "chosen": "x" * 50}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_dataset(path, tmp_path, "dpo", None, max_seq_len=40)
    learned = [
        [
            tokenizer.decode(labels[labels >= 0].tolist(), skip_special_tokens=False)
            for labels in (np.asarray(row.labels) for row in data[index].answers)
        ]
        for index in range(3)
    ]
    assert learned[:2] == [
        ["good<|endoftext|>", "bad<|endoftext|>"],
        ["good<|im_end|>", "bad<|im_end|>"],
    ]
    assert learned[2] == ["x" * 37, "bad<|endoftext|>"]
    chosen, rejected = data[1].answers
    assert np.array_equal(chosen.input_ids[:10], rejected.input_ids[:10]), "one prompt"

    encoder, file = Encoder(tmp_path), read_file(path, "dpo")
    assert file.unused == ["keys of a preference that are not used: 'mood' (1 time)"]
    found = measure_samples(file.samples, encoder, 40)
    assert (found.longest, found.cut, found.lost) == (54, 1, 14)
    assert sorted(measure_lengths(path, tmp_path, None, pairs=True))[-1] == 54


def test_a_run_on_one_answer_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(TEXTS))
    with pytest.raises(DataError, match="'chosen' is a preference: learn the comparison with"):
        read_file(path, "causal-lm")
