"""The whole file decides whether its lines are classified, and as what."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.test_tokens import write
from trainer.config.run import Classes, load_config
from trainer.data import labelling
from trainer.data.labelling import Labelling, find_labels, with_names
from trainer.data.records import DataError
from trainer.data.samples import read_file, read_samples
from trainer.system.errors import InputError


def labelled(path: Path, labels: list[Any], key: str = "input") -> Path:
    return write(path, *({key: f"text {n}", "label": label} for n, label in enumerate(labels)))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ([0, 4, 2], 5),
        ([0], 2),
        ([1.0, 0.0], 2),
        ([0, 1.0, 2], 3),
        (["spam", "ham", "spam"], ("ham", "spam")),
        (["b", "a", "ä", "B"], ("B", "a", "b", "ä")),
        ([True], ("false", "true")),
        ([False, True, True], ("false", "true")),
        (["1", "0", "10"], 11),  # a table holds numbers as text
        (["1.0", "0.0"], 2),
        (["1", "2", "3+"], ("1", "2", "3+")),
        (["-1", "0", "1"], ("-1", "0", "1")),
        (["2023", "2024"], ("2023", "2024")),
        (["yes", "no"], ("no", "yes")),
    ],
)
@pytest.mark.parametrize("key", ["input", "text", "sentence"])
def test_labels_are_numbers_or_words(
    tmp_path: Path, labels: list[Any], classes: Classes, key: str
) -> None:
    path = labelled(tmp_path / "a.jsonl", labels, key)
    found = find_labels(path)
    assert found is not None
    assert (found.task, found.classes) == ("classify", classes)
    names = list(classes) if isinstance(classes, tuple) else []
    spelt = [{True: "true", False: "false"}[x] if x is True or x is False else x for x in labels]
    wanted = [names.index(label) if names else int(float(label)) for label in spelt]
    file = read_file(path, "classify", classes)
    assert [sample.label for sample in file.samples] == wanted
    assert [sample.text for sample in file.samples] == [f"text {n}" for n in range(len(labels))]


def test_numbers_without_a_line_are_named(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.jsonl", [1, 5, 3])
    assert find_labels(path) == Labelling("classify", 6, absent=(0, 2, 4))


@pytest.mark.parametrize(
    ("labels", "base", "classes"),
    [
        (["neg", "pos"], ("pos", "neg"), ("pos", "neg")),
        (["pos"], ("neu", "pos", "neg"), ("neu", "pos", "neg")),
        (["neg", "other"], ("pos", "neg"), ("neg", "other")),
        ([0, 1], ("pos", "neg", "neu"), 3),
        ([0, 3], ("pos", "neg", "neu"), 4),
    ],
)
def test_a_base_that_knows_the_classes_decides_their_order(
    tmp_path: Path, labels: list[Any], base: tuple[str, ...], classes: Classes
) -> None:
    found = find_labels(labelled(tmp_path / "a.jsonl", labels), base)
    assert found is not None
    assert found.classes == classes


@pytest.mark.parametrize("word", ["NA", "nan", "None", "null", "N/A", " NULL "])
def test_a_word_that_pandas_reads_as_no_label_is_no_class_of_a_table(
    tmp_path: Path, word: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"input,label\nx,EU\ny,{word}\nz,US\n")
    with pytest.raises(DataError) as caught:
        read_file(path, "classify", ("EU", "US", word.strip()))
    told = f"{path}:3: 'label' is '{word.strip()}', which pandas and datasets read as no label"
    assert str(caught.value).startswith(told)
    lines = labelled(tmp_path / "a.jsonl", ["EU", word, "US"])
    assert len(read_file(lines, "classify", ("EU", "US", word)).samples) == 3


def test_an_empty_label_of_a_table_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('input,label\nx,EU\ny,\nz,""\nw,US\n')
    with pytest.raises(InputError, match=r"none in 2 lines \(lines 3, 4\)"):
        find_labels(path)


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ([{"input": "x"}], "in 2 lines (a.jsonl:1, a.jsonl:2), and none in 1 line (sub/b.jsonl:1)"),
        ([{"input": "x", "label": 1}], "a word in 2 lines (a.jsonl:1, a.jsonl:2), a number in 1 l"),
        ([{"input": "x", "label": [1, 2]}], "sub/b.jsonl:1: 'label' must be a word"),
    ],
)
def test_of_a_folder_a_refusal_names_the_file_and_its_line(
    tmp_path: Path, second: list[Any], problem: str
) -> None:
    labelled(tmp_path / "a.jsonl", ["ham", "spam"])
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub/b.jsonl", *second)
    with pytest.raises(InputError) as caught:
        find_labels(tmp_path)
    assert problem in str(caught.value)
    if second[0].get("label") == 1:
        with pytest.raises(DataError) as later:
            read_file(tmp_path, "classify", ("ham", "spam"))
        there = f"{tmp_path}/sub/b.jsonl:1: "
        told = f"{there}'label' is a number, that of a.jsonl:1 is a word"
        assert str(later.value) == told


MIXED = [{"input": "x", "label": n % 2} for n in range(239)]


@pytest.mark.parametrize(
    ("trees", "problem"),
    [
        (
            [{"input": "x"}, *MIXED],
            "a 'label' is in 239 lines (lines 2, 3, 4, 5, 6, ...), and none in 1 line",
        ),
        ([*MIXED, {"input": "x"}], "none in 1 line (line 240)"),
        ([*MIXED, {"input": "x", "label": None}], "none in 1 line (line 240)"),
        ([{"text": "x"}, {"text": "x", "label": "a"}] * 2, "none in 2 lines (lines 1, 3)"),
        ([*MIXED, {"input": "x", "lable": 1}], "(line 240), but 'lable': give"),
        ([{"messages": []}, {"label": 3}], "a 'label' is in 1 line (line 2)"),
        ([{"input": "x", "lable": 1}] * 3, "but 'lable' is in 3 lines (lines 1, 2, 3): rename it"),
        ([{"text": "x", "Label": "a"}], "but 'Label' is in 1 line (line 1): rename it"),
        ([{"text": "x", "labels": [1]}], "but 'labels' is in 1 line (line 1): rename it"),
        ([{"text": "x", "label_text": "a"}], "but 'label_text' is in 1 line (line 1): rename it"),
        ([{"text": "x", "fine_label": 1}], "but 'fine_label' is in 1 line (line 1): rename it"),
        ([{"input": "x", "label": 1}, {"input": "x", "label": "a"}], "a number in 1 line (line 1)"),
        ([{"input": "x", "label": 1}, {"input": "x", "label": "1"}], "a word in 1 line (line 2)"),
        ([{"input": "x", "label": True}, {"input": "x", "label": 1}], "a boolean in 1 line"),
        ([{"input": "x", "label": True}, {"input": "x", "label": "true"}], "a word in 1 line"),
        ([{"input": "x", "label": "spam"}] * 2, "every label is 'spam'; a classifier needs two"),
        ([{"input": "x", "label": 0.5}], "a.jsonl:1: 'label' must be a word or a whole number"),
        ([{"input": "x", "label": [0, 2]}], "got a list"),
        ([{"input": "x", "label": {"a": 1}}], "got an object"),
        ([{"input": "x", "label": " "}], "a.jsonl:1: 'label' is empty"),
        ([{"input": "x", "label": "a\n"}], "'label' 'a\\n' has a control character"),
        ([*MIXED, {"input": "x", "label": -1}], "a.jsonl:240: 'label' -1: classes have numbers"),
        ([{"input": "x", "label": 4000}], "'label' 4000: classes have numbers from 0 to 99"),
        ([{"text": "x", "label": f"w{n}"} for n in range(101)], "a.jsonl:101: 'label' 'w100' is"),
        ([{"prompt": "x", "completion": "y", "label": True}], "has a 'label' beside 'completion'"),
        ([{"instruction": "x", "input": "y", "output": "z", "label": 1}], "beside 'output'"),
        ([{"messages": [], "label": 1}], "beside 'messages'"),
    ],
)
def test_what_is_no_classification_is_refused(
    tmp_path: Path, trees: list[Any], problem: str
) -> None:
    with pytest.raises(InputError) as caught:
        find_labels(write(tmp_path / "a.jsonl", *trees))
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "trees",
    [
        [{"text": "a"}],
        [{"text": "a", "table": 3, "category": "x"}],  # metadata of a text
        [{"messages": [], "label_quality": 5}],
        [{"prompt": "a", "completion": "b"}] * 3,
    ],
)
def test_lines_without_labels_are_texts(tmp_path: Path, trees: list[Any]) -> None:
    assert find_labels(write(tmp_path / "a.jsonl", *trees)) == Labelling("causal-lm")


@pytest.mark.parametrize(
    ("last", "columns", "found"),
    [
        ('{"text": "x", "label": 1}', None, "'label' is in 1 line (line 200), and none in 199"),
        ('{"text": "x", "\\u006cabel": 1}', None, "'label' is in 1 line (line 200)"),
        ('{"text": "x", "y": "1"}', {"text": "text", "label": "y"}, "'label' is in 1 line"),
        ('{"text": "x", "ö": 1}', {"text": "text", "label": "ö"}, "'label' is in 1 line"),
        ('{"text": "x", "\\u00f6": 1}', {"text": "text", "label": "ö"}, "'label' is in 1 line"),
        ('{"text": "x", "label": 1}', {"text": "text"}, None),
        ('{"text": "a \\"label\\": 3", "ö": 1}', None, None),
    ],
)
def test_a_key_anywhere_in_many_lines_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    columns: dict[str, str] | None,
    found: str | None,
) -> None:
    monkeypatch.setattr(labelling, "HEAD_BYTES", 100)
    monkeypatch.setattr(labelling, "_PIECE", 37)  # the key may lie across two pieces
    path = tmp_path / "a.jsonl"
    others = {"y": None, "ö": None} if columns and "label" in columns else {}
    lines = [json.dumps({"text": f"text {n}", **others}) for n in range(199)]
    path.write_text("\n".join([*lines, last]))
    if found is None:
        assert find_labels(path, columns=columns) == Labelling("causal-lm")
        return
    with pytest.raises(InputError, match=re.escape(found)):
        find_labels(path, columns=columns)


def test_of_many_lines_without_labels_the_first_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", *({"text": f"text {n}"} for n in range(200)))
    monkeypatch.setattr(labelling, "HEAD_BYTES", 100)
    parsed: list[int] = []
    add = labelling._Findings.add  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(
        labelling._Findings,  # pyright: ignore[reportPrivateUsage]
        "add",
        lambda self, record: (parsed.append(record.number), add(self, record)),
    )
    assert find_labels(path) == Labelling("causal-lm")
    assert 1 < len(parsed) < 10
    near = write(tmp_path / "b.jsonl", *({"text": "x", "labels": n} for n in range(200)))
    with pytest.raises(InputError, match="'labels' is in 200 lines"):
        find_labels(near)
    late = tmp_path / "c.jsonl"
    late.write_text('{"a\n' * 100 + '{"text": "x"}\n')
    assert find_labels(late) == Labelling("causal-lm")


def test_lines_up_to_a_bad_one_count(tmp_path: Path) -> None:
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(b'\xef\xbb\xbf{"input": "a", "label": 2}\n\n\xff{"torn\n')
    assert find_labels(torn) == Labelling("classify", 3, absent=(0, 1))
    for path in (tmp_path / "absent", write(tmp_path / "empty")):
        assert find_labels(path) is None


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"input": "x", "label": "eggs"}, "'label' must be one of the classes 'ham', 'spam', got"),
        ({"input": "x", "label": 2}, "'label' must be from 0 to 1, got 2"),
        ({"input": "x", "label": 1}, "'label' is a number, that of line 1 is a word"),
        ({"input": "x", "lable": "ham"}, "lacks the key 'label'; is it 'lable'? rename that"),
        ({"input": "x", "text": "y", "label": "ham"}, "has 'input' and 'text', of which one is"),
        ({"sentence1": "x", "sentence2": "y", "label": 1}, "'sentence1' is one of two texts"),
        ({"question": "x", "sentence": "y", "label": 1}, "'question' is one of two texts"),
        ({"sms": "x", "label": "ham"}, "lacks the key 'input' (or 'text'); its other keys are"),
    ],
)
def test_a_line_of_other_classes_is_named(tmp_path: Path, tree: Any, problem: str) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "fine", "label": "ham"}, tree)
    with pytest.raises(DataError) as caught:
        read_samples(path, "classify", ("ham", "spam"))
    assert str(caught.value).startswith(f"{path}:2: ")
    assert problem in str(caught.value)


def test_a_class_with_a_name_may_be_given_by_its_number(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.jsonl", [1, 0, 1.0])
    file = read_file(path, "classify", ("ham", "spam"))
    assert [sample.label for sample in file.samples] == [1, 0, 1]
    assert file.labels == "number"


@pytest.mark.parametrize(
    ("labels", "base", "names"),
    [
        (["spam", "ham"], (), ("ham", "spam")),
        (["spam", "ham"], ("spam", "ham"), ("spam", "ham")),
        ([0, 1], (), None),
        ([0, 1], ("ham", "spam"), ("ham", "spam")),
        ([0, 1], ("a", "b", "c"), None),
        (["0", "1"], (), None),
    ],
)
def test_a_config_without_names_takes_the_datas_words(
    tmp_path: Path, labels: list[Any], base: tuple[str, ...], names: tuple[str, ...] | None
) -> None:
    path = labelled(tmp_path / "a.jsonl", labels)
    settings = {"model.path": "m", "data.train": str(path), "num_classes": 2}
    assert with_names(load_config(None, settings), base).class_names == names
    given = load_config(None, {**settings, "class_names": ["x", "y"]})
    assert with_names(given, base) is given


def test_data_without_labels_names_the_settings_of_its_task(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "one"}, {"text": "two"})
    config = load_config("quickstart", {"data.train": str(path)})
    with pytest.raises(InputError, match=r"a\.jsonl: no line has a 'label', and task is classify"):
        with_names(config, ())
    other = load_config(
        "quickstart", {"data.train": str(path), "task": "causal-lm", "num_classes": None}
    )
    assert with_names(other, ()) is other


def test_as_many_words_as_classes(tmp_path: Path) -> None:
    path = labelled(tmp_path / "a.jsonl", ["a", "b"])
    settings = {"model.path": "m", "data.train": str(path), "num_classes": 3}
    told = r"2 words \('a', 'b'\), and num_classes is 3; set it to 2"
    with pytest.raises(InputError, match=told):
        with_names(load_config(None, settings), ())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"num_classes": 3, "class_names": ["a", "b"]}, "class_names must be 3 different names"),
        ({"class_names": ["a", "a"]}, "class_names must be 2 different names"),
        ({"class_names": ["a", " "]}, "class_names"),
        ({"class_names": ["a"]}, "greater than or equal to 2"),
        ({"task": "causal-lm", "class_names": ["a", "b"]}, "only allowed when task is classify"),
    ],
)
def test_names_that_are_no_names(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        load_config(None, {"model.path": "m", "data.train": "d", **settings})


def test_names_are_counted_and_agreed_on() -> None:
    paths = {"model.path": "m", "data.train": "d"}
    named, other, counted = (
        load_config(None, {**paths, **more})
        for more in (
            {"class_names": ["a", "b"]},
            {"class_names": ["b", "a"]},
            {"num_classes": 2},
        )
    )
    assert (named.num_classes, named.classes, counted.classes) == (2, ("a", "b"), 2)
    assert len({config.agreement_digest() for config in (named, other, counted)}) == 3
    assert named.list_changes(other) == ["class_names: ['a', 'b'] -> ['b', 'a']"]
