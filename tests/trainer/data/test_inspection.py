"""`trainer inspect-data` shows what a file holds and what of it is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.trainer.data.spaced_tokenizer import KINDS, Kind, spaced_tokenizer
from tests.trainer.data.test_tokens import byte_tokenizer, write
from tests.trainer.small_model import write_data, write_model
from trainer.commands.inspect_data import inspect_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, whose tokenizer splits a text into bytes."""
    folder = tmp_path_factory.mktemp("inspection")
    model = write_model(folder / "model", write_data(folder / "data.jsonl"))
    byte_tokenizer(model)
    return model


def shown(*arguments: object, **environment: str | None) -> str:
    done = CliRunner().invoke(inspect_data, [*map(str, arguments)], env=environment)
    assert done.exit_code == 0, done.output
    return done.stdout


def inspected(*arguments: object) -> dict[str, Any]:
    tree = json.loads(shown(*arguments, "--json"))
    assert tree["schema"] == "motley.data/2"
    return tree


def test_a_classification(model: Path, tmp_path: Path) -> None:
    labels = ["spam", "spam", "ham", "spam", "spam", "ham", "spam", "spam"]
    rows = [
        {"text": "ab" * size, "label": label, "colour": 1}
        for size, label in enumerate(labels, start=1)
    ]
    data = write(tmp_path / "a.jsonl", *rows, rows[0], rows[1] | {"label": "ham"})
    held_out = write(tmp_path / "v.jsonl", rows[2], {"text": "new", "label": "ham"})
    options = ("--model", model, "--validation", held_out, "--max-seq-len", 10, "--samples", 2)
    tree = inspected(data, *options)
    assert (tree["task"], tree["samples"], tree["validation_samples"]) == ("classify", 10, 2)
    assert tree["shapes"] == {"{text, label}": 10}
    assert tree["classes"] == {"ham": 3, "spam": 7}
    assert [tree[key] for key in ("duplicates", "ambiguous", "in_both")] == [1, 1, 1]
    assert tree["tokens"] == {
        "total": 78,
        "longest": 16,
        "histogram": [[2, 2], [4, 2], [8, 2], [16, 4]],
        "max_seq_len": 10,
        "cut_samples": 3,
        "cut_tokens": 12,
        "unlearned_samples": 0,
    }
    assert tree["unused"] == ["keys of a line with a label that are not used: 'colour' (10 times)"]
    first = {"location": f"{data}:1", "label": "spam", "spans": [{"text": "ab", "learned": False}]}
    assert tree["examples"][0] == first
    assert len(tree["examples"]) == 2
    text = shown(data, *options)
    for words in (
        "10 samples, 78 tokens, the longest has 16",
        "3 samples are longer than max_seq_len 10 and cut: 12 tokens (15.4 %) are lost",
        "samples of each class: ham 3, spam 7",
        "1 of 2 validation samples is also in train",
        f"{data}:1 -> spam",
    ):
        assert words in text
    assert "[[" not in text


@pytest.mark.parametrize(
    ("tree", "shape", "pieces"),
    [
        ({"text": "abc"}, "{text}", [("a", False), ("bc<|endoftext|>", True)]),
        (
            {"prompt": "ab", "completion": "cd"},
            "{prompt, completion}",
            [("ab", False), ("cd<|endoftext|>", True)],
        ),
        (
            {
                "messages": [
                    {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "a"))
                ]
            },
            "{messages}",
            None,
        ),
    ],
)
def test_what_is_learned(
    model: Path, tmp_path: Path, tree: Any, shape: str, pieces: list[tuple[str, bool]] | None
) -> None:
    data = write(tmp_path / "a.jsonl", tree)
    found = inspected(data, "--model", model)
    assert (found["task"], found["shapes"], found["classes"]) == ("causal-lm", {shape: 1}, None)
    (example,) = found["examples"]
    shown_pieces = [(piece["text"], piece["learned"]) for piece in example["spans"]]
    if pieces is None:
        learned = "".join(text for text, is_learned in shown_pieces if is_learned)
        assert "a" in learned
        assert "q" not in learned
    else:
        assert shown_pieces == pieces


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_text_keep_the_spaces_between_them(tmp_path: Path, kind: Kind) -> None:
    """A tokenizer in SentencePiece's manner omits the first space of what it decodes."""
    spaced_tokenizer(tmp_path / "model", kind)
    data = write(tmp_path / "a.jsonl", {"prompt": "a time", "completion": " time é b"})
    (example,) = inspected(data, "--model", tmp_path / "model")["examples"]
    texts = [piece["text"] for piece in example["spans"]]
    assert texts == ["<s> a time", " time é b</s>"]


@pytest.mark.parametrize(
    ("environment", "marked"),
    [
        ({}, "ab[[cd<|endoftext|>]]"),
        ({"FORCE_COLOR": "1", "TERM": "xterm"}, "ab\x1b[32mcd<|endoftext|>\x1b[0m"),
        ({"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": "1"}, "ab[[cd<|endoftext|>]]"),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, "ab[[cd<|endoftext|>]]"),
    ],
)
def test_what_is_learned_is_green_or_marked(
    model: Path, tmp_path: Path, environment: dict[str, str], marked: str
) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt": "ab", "completion": "cd"})
    plain = {"FORCE_COLOR": None, "NO_COLOR": None, "COLORTERM": None}
    assert marked in shown(data, "--model", model, **{**plain, **environment})


def test_other_settings_are_taken_as_a_run_takes_them(model: Path, tmp_path: Path) -> None:
    rows = [{"text": "x", "label": label} for label in ("a", "b")]
    data = write(tmp_path / "a.jsonl", *rows)
    names = ("--set", "class_names=[b, c, a]")
    assert inspected(data, "--model", model, *names)["classes"] == {"b": 1, "c": 0, "a": 1}
    tree = inspected(data, "--model", model, "--task", "causal-lm")
    assert tree["unused"] == ["keys of a data line that are not used: 'label' (2 times)"]


def test_without_a_model_there_are_no_tokens(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jsonl", {"text": "x", "label": 0}, {"text": "y", "label": 2})
    tree = inspected(data)
    assert (tree["tokens"], tree["classes"]) == (None, {"0": 1, "1": 0, "2": 1})
    assert "2 samples; their tokens need --model" in shown(data)


def test_columns_of_another_name(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("body,kind\nhello,a\nbye,b\n")
    columns = ("--set", "data.columns={input: body, label: kind}")
    found = inspected(table, "--validation", table, *columns)
    assert (found["task"], found["samples"], found["validation_samples"]) == ("classify", 2, 2)
    assert found["classes"] == {"a": 1, "b": 1}
