"""The score of minutes: ROUGE-L as google-research computes it, and the action items found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.trainer.saved_run import Run, runner
from trainer.data.meetings.minutes import ActionItem, Minutes
from trainer.data.shapes import ChatMessage, Sample
from trainer.evaluate.summaries import (
    Reference,
    Score,
    compare,
    figures,
    read_references,
    rouge_l,
)
from trainer.evaluate.tasks import Material, make_tasks
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [  # RougeScorer(["rougeL"]).score(answer, reference)["rougeL"].fmeasure of rouge-score 0.1.2
        ("the cat sat on the mat", "the cat is on the mat", 0.8333333333333334),
        ("Decisions:\n- Hold it.\n", "decisions: none", 0.4),
        ("It's Tom's (by Friday), isn't it?", "Tom: is it by Friday?", 0.42857142857142855),
        ("x", "y", 0.0),
        ("", "a", 0.0),
        ("a b c", "a b c", 1.0),
    ],
)
def test_rouge_l_is_that_of_rouge_score(answer: str, reference: str, expected: float) -> None:
    assert rouge_l(answer, reference) == pytest.approx(expected, abs=1e-12)


ITEMS = (ActionItem("Ann", "call the café", "Friday"), ActionItem("Tom", "book it"))


def reference(*items: ActionItem) -> Reference:
    answer = str(Minutes("It was short.", ["Go."], items))
    return Reference(Sample("", messages=(ChatMessage("assistant", answer),)), "a:1", items)


def test_owner_and_task_decide_whether_an_item_is_found() -> None:
    wanted = reference(*ITEMS, ITEMS[1])
    score = compare("Action items:\n- ANN: Call the café! (by May)\n- Tom: book it\n", wanted)
    assert (score.matched, score.wanted, score.written) == (2, 3, 2)
    score = compare("Action items:\n- Ann: book it\n- Tom: call the cafe\n- Tom: x", wanted)
    assert (score.matched, score.wanted, score.written) == (0, 3, 3)
    assert compare(wanted.answer, wanted) == Score(1.0, 3, 3, 3)


def test_figures_have_intervals() -> None:
    found = figures([Score(0.5, 1, 2, 2), Score(1.0, 2, 2, 4)] * 20)
    assert found["rouge_l"] == 0.75
    assert found["action_items_found"] == 0.75
    assert found["action_items_right"] == 0.5
    assert 0.65 < found["rouge_l_low"] < 0.73
    assert 0.77 < found["rouge_l_high"] < 0.85
    assert found["action_items_right_low"] == found["action_items_right_high"] == 0.5
    assert figures([Score(0.5, 1, 2, 2), Score(1.0, 2, 2, 4)] * 20) == found


def test_figures_about_nothing_are_left_out() -> None:
    assert figures([Score(0.5, 0, 0, 0)]) == {
        "rouge_l": 0.5,
        "rouge_l_low": 0.5,
        "rouge_l_high": 0.5,
    }
    assert "action_items_right" not in figures([Score(0.5, 0, 2, 0)])


def write(path: Path, *trees: Any) -> Path:
    path.write_text("".join(json.dumps(tree) + "\n" for tree in trees))
    return path


def line(answer: str = str(reference(*ITEMS).answer), **more: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "Ann: hello\nTom: yes\n\nSum it up."}
    return {"messages": [asked, {"role": "assistant", "content": answer}], **more}


def test_references_come_from_the_key_or_else_from_the_answer(tmp_path: Path) -> None:
    given = [{"owner": "Eve", "task": "wait", "due": None, "more": 1}]
    path = write(tmp_path / "a.jsonl", line(action_items=given), line())
    first, second = read_references(path)
    assert first.action_items == [ActionItem("Eve", "wait")]
    assert second.action_items == list(ITEMS)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"text": "no conversation"}, "a.jsonl:2: has no answer at its end"),
        ({"messages": [*line()["messages"], {"role": "user", "content": "?"}]}, "no answer at its"),
        (line(action_items="Tom"), "a.jsonl:2: action_items must be a list of objects"),
        (line(action_items=[{"owner": "Tom"}]), "with owner and task"),
        (line(action_items=[{"owner": "Tom", "task": 1}]), "with owner and task"),
    ],
)
def test_lines_that_cannot_be_scored_are_named(tmp_path: Path, tree: Any, said: str) -> None:
    path = write(tmp_path / "a.jsonl", line(), tree)
    with pytest.raises(InputError, match=said):
        make_tasks("summaries", Material(data=[path]))
    with pytest.raises(InputError, match="task summaries: give --data"):
        make_tasks("summaries", Material())


def test_what_does_not_fit_is_said_and_costs_no_other_figure(
    tmp_path: Path, model: Path, make_config: MakeConfig
) -> None:
    path = write(tmp_path / "a.jsonl", line())
    for tokens, said in (
        (24, "leaves no room for a prompt in max_seq_len 24"),
        (20, f"{path}:1: cannot be cut to a prompt of 4 tokens"),
    ):
        (task,) = make_tasks("summaries", Material(data=[path], max_new_tokens=tokens))
        run = Run(tmp_path / f"run{tokens}", model, make_config)  # max_seq_len 24
        run.save(1)
        runner(run, task).run()
        assert said in run.records[0]["tasks"]["summaries"]["error"]
