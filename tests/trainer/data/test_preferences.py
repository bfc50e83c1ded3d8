"""Preferences as TRL and others publish them: two answers to a prompt, as texts or as turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.test_tokens import byte_tokenizer
from trainer.data.encoder import Encoder
from trainer.data.lengths import measure_lengths
from trainer.data.measurement import measure
from trainer.data.records import DataError
from trainer.data.samples import read_file
from trainer.data.shapes import Sample, parse_sample
from trainer.data.tokens import load_dataset
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


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"prompt": "q", "completion": "a"}, "a preference has 'prompt', 'chosen' and 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "are texts, and there is no 'prompt'"),
        ({**TEXTS, "rejected": "good"}, "'chosen' and 'rejected' are the same"),
        ({**TEXTS, "rejected": [BAD]}, "must both be texts, or both be turns"),
        ({**TEXTS, "system": "s"}, "'system' needs turns, and 'prompt' is a text"),
        ({**WHOLE, "prompt": "another"}, "'prompt' is no turn that both"),
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
    found = measure(file.samples, encoder, 40)
    assert (found.lengths[0], found.lengths[2], found.cut, found.lost) == (8, 54, 1, 14)
    assert sorted(measure_lengths(path, tmp_path, None, pairs=True))[-1] == 54


def test_a_run_on_one_answer_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(TEXTS))
    with pytest.raises(DataError, match="'chosen' is a preference: learn the comparison with"):
        read_file(path, "causal-lm")
