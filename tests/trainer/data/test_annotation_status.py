"""Exports of annotation tools: rejected lines are refused, labels are named, in every format."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.data.annotation_status import check_accepted, find_rejections
from trainer.data.labelling import Labelling, find_labels
from trainer.data.records import DataError
from trainer.data.samples import read_samples
from trainer.data.shapes import parse_sample
from trainer.data.values import BadLineError
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    "status",
    [
        {"answer": "reject"},  # Prodigy
        {"answer": "ignore"},
        {"status": "Discarded"},  # Argilla
        {"label.responses.status": ["submitted", "discarded"]},
        {"label.responses.status": ["draft"]},
        {"status": "tie"},  # distilabel
        {"AssignmentStatus": "Rejected"},  # Mechanical Turk
        {"was_cancelled": True},  # Label Studio
        {"was_cancelled": "True"},
        {"accepted": False},
        {"is_approved": "0"},
    ],
)
def test_what_was_rejected_is_refused_in_every_task(status: dict[str, Any]) -> None:
    (key,) = status
    for tree, pairs in (
        ({"text": "x"}, False),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, True),
    ):
        with pytest.raises(BadLineError, match=f"'{key}' is .*: the line was not accepted"):
            parse_sample(tree | status, 1, pairs=pairs)


@pytest.mark.parametrize(
    "status",
    [
        *({"answer": "accept"}, {"answer": "invalid"}, {"answer": "42"}, {"answer": ["reject it"]}),
        *({"status": "Validated"}, {"status": "completed"}, {"status": None}, {"status": ""}),
        *({"label.responses.status": ["submitted"]}, {"AssignmentStatus": "Approved"}),
        *({"was_cancelled": False}, {"accepted": True}, {"accepted": None}, {"reject": "rejected"}),
    ],
)
def test_what_was_accepted_is_read(status: dict[str, Any]) -> None:
    check_accepted(status)
    assert find_rejections(status) == {}
    assert parse_sample({"text": "x"} | status, 1).text == "x"


def as_json_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pa = pytest.importorskip("pyarrow", reason="the launcher-only install has none")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), path)


WRITERS = {"a.jsonl": as_json_lines, "a.csv": as_table, "a.parquet": as_parquet}
COLUMNS = {"input": "message", "label": "class"}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_a_status_counts_in_every_format_and_beside_chosen_columns(
    tmp_path: Path, name: str, columns: dict[str, str] | None
) -> None:
    write: Callable[[Path, list[dict[str, Any]]], None] = WRITERS[name]
    keys = columns or {"input": "input", "label": "label"}
    rows = [
        {keys["input"]: f"x{n}", keys["label"]: n % 2, "more": "y", "answer": answer}
        for n, answer in enumerate(("accept", "accept", "reject", "accept"))
    ]
    path = tmp_path / name
    write(path, rows)
    with pytest.raises(DataError, match=f"a.*[: ]{4 if name == 'a.csv' else 3}: 'answer' is"):
        read_samples(path, "classify", 2, columns)
    write(path, [row for row in rows if row["answer"] == "accept"])
    assert [each.label for each in read_samples(path, "classify", 2, columns)] == [0, 1, 1]


def test_a_list_of_one_label_is_a_label(tmp_path: Path) -> None:
    """So doccano and Prodigy write it."""
    path = tmp_path / "a.jsonl"
    as_json_lines(path, [{"id": n, "text": "x", "label": [word]} for n, word in enumerate("ab")])
    assert find_labels(path) == Labelling("classify", ("a", "b"))
    assert [each.label for each in read_samples(path, "classify", ("a", "b"))] == [0, 1]


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        (["a", "b"], "got a list of 2; a line is of one class"),
        ([], "got a list of 0"),
        ([[0, 5, "PER"]], "got a list of 3"),
        ([{"user_id": "u", "value": "a", "status": "submitted"}], "got an object"),
        ({"choices": ["a", "b"]}, "got an object"),
    ],
)
def test_other_lists_are_refused(tmp_path: Path, label: Any, problem: str) -> None:
    as_json_lines(tmp_path / "a.jsonl", [{"text": "x", "label": label}])
    with pytest.raises(InputError, match=problem):
        find_labels(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"accept": ["a"], "options": []}, "'accept' is in 1 line .*: rename it to 'label'"),
        ({"cats": {"a": 1.0}}, "'cats' is in 1 line"),
        ({"annotation": "a", "prediction": None}, "'annotation' is in 1 line"),
        ({"mood.responses": ["a"]}, r"'mood\.responses' is in 1 line"),
        ({"mood": "a", "annotation_id": 7}, "name the key of the choice with data.columns.label"),
    ],
)
def test_labels_of_tools_are_not_left_out_silently(
    tmp_path: Path, row: dict[str, Any], says: str
) -> None:
    as_json_lines(tmp_path / "a.jsonl", [{"text": "x"} | row])
    with pytest.raises(InputError, match=f"no line has a 'label', but .*{says}"):
        find_labels(tmp_path / "a.jsonl")


@pytest.mark.parametrize("row", [{"data": {"text": "x"}}, {"text": "x"}])
def test_nested_annotations_are_refused_with_the_way_on(row: dict[str, Any]) -> None:
    with pytest.raises(BadLineError, match="'annotations' is what an annotation tool exports"):
        parse_sample(row | {"annotations": [{"result": []}]}, 1)
