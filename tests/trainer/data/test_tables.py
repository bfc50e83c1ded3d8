"""Tables as spreadsheets, pandas, GLUE, Kaggle and MySQL write them: read as meant, or refused."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from trainer.data.formats import read_records
from trainer.data.records import DataError, Problems
from trainer.data.samples import read_file
from trainer.system.errors import InputError

ROWS = [("it is a fine film", "1"), ("plain words", "0"), ("last of all", "0")]
HEADER = "text\tlabel\n"


def read(path: Path, text: str, name: str = "a.tsv") -> list[dict[str, Any]]:
    """Return the rows, without their labels where all have one column of text."""
    (path / name).write_text(text)
    problems = Problems()
    found = [record.tree for record in read_records(path / name, problems)]
    problems.raise_if_any()
    return found


@pytest.mark.parametrize(
    "texts",
    [
        ['"open', "plain", 'closed"'],
        ['"open', "plain", "never closed"],
        ['"Two" words', "plain", '"'],
        ['say "no"', '"a ""b""" c', '"open'],
        ["5'11\" tall", '"', '""" three'],
        ['"open', '"once more', 'closed"'],
    ],
)
def test_rows_of_tabs_without_quoting_are_rows(tmp_path: Path, texts: list[str]) -> None:
    text = HEADER + "".join(f"{each}\t{n % 2}\n" for n, each in enumerate(texts))
    assert [row["text"] for row in read(tmp_path, text)] == texts
    ahead = "label\ttext\n" + "".join(f"{n % 2}\t{each}\n" for n, each in enumerate(texts))
    assert [row["text"] for row in read(tmp_path, ahead)] == texts


def test_rows_that_were_one_by_a_quotation_mark_have_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(HEADER + '"open\t1\nx\t0\nend"\t1\n')
    found = list(read_records(tmp_path / "a.tsv", Problems()))
    assert [record.number for record in found] == [2, 3, 4]


@pytest.mark.parametrize("delimiter", ["\t", ",", ";"])
@pytest.mark.parametrize("order", [["text", "label"], ["label", "text"], ["id", "text", "label"]])
def test_texts_of_several_lines_in_quotation_marks_stay_whole(
    tmp_path: Path, delimiter: str, order: list[str]
) -> None:
    texts = [
        "Dear Sir, you\nare here, too",
        'a "b"\r\nc\td',
        "Hello,world\nbye",
        "x\n\ny",
        "a;b\n3",
    ]
    rows = [{"id": n, "text": each, "label": n % 2} for n, each in enumerate(texts)]
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, order, delimiter=delimiter, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    path = tmp_path / "a.csv"
    path.write_bytes(out.getvalue().encode())
    problems = Problems()
    found = [record.tree["text"] for record in read_records(path, problems)]
    problems.raise_if_any()
    assert found == texts


OPEN = "a quotation mark opens a field and is not closed"
ESCAPED = "has a backslash before a quotation mark"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('text,label\nx,0\n"open,1\ny,0\n', f"3: not CSV: {OPEN}"),
        ('text,label\nx,0\nz,1\n"open,1\ny,0\nend",1\n', f"4: not CSV: {OPEN}"),
        ('text,label\nx,good\nz,bad\n"open,good\ny,bad\nend",good\n', f"4: not CSV: {OPEN}"),
        ('text,label\n"he said \\"no\\"",0\n', f"2: {ESCAPED}"),
        ('text,label\n"he said \\"",0\n"x",1\n', f"2: {ESCAPED}"),
        ('text,label\n"he said \\"",0\nx,1\ny",1\n', f"2: {ESCAPED}"),
        ('text,label\n"a \\", b",0\n', f"2: {ESCAPED}"),
        ("text\tlabel\none\\\ntwo\t0\n", f"2: {ESCAPED}"),
        ("text\tlabel\nx\t\\N\n", r"2: 'label' is \N, which MySQL writes for null"),
        ("text\tlabel\n\\N\t0\n", r"2: 'text' is \N, which MySQL"),
        ("text,text,,label\nx,y,,0\n", "1: the header has the column 'text' twice"),
    ],
)
def test_what_is_no_row_is_refused_with_the_cause(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, text, "a.tsv" if "\t" in text else "a.csv")
    assert f":{problem}" in str(caught.value).splitlines()[0]


@pytest.mark.parametrize("text", ['text,label\n"C:\\dir\\",1\n', "text,label\nC:\\new,1\n"])
def test_a_backslash_is_text(tmp_path: Path, text: str) -> None:
    (row,) = read(tmp_path, text, "a.csv")
    assert row["text"] in ("C:\\dir\\", "C:\\new")


def test_a_line_that_is_no_text_does_not_end_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,label\nx\0,1\ny,0\n")
    problems = Problems()
    assert [each.tree["text"] for each in read_records(tmp_path / "a.csv", problems)] == ["y"]
    with pytest.raises(DataError, match="2: contains a NUL byte"):
        problems.raise_if_any()


@pytest.mark.parametrize(
    ("header", "row", "tree"),
    [
        ("text,label,,", "x,1,,", {"text": "x", "label": "1"}),
        ("text,label,,", "x,1,more,", {"text": "x", "label": "1", "column 3": "more"}),
        (",text,label", "7,x,1", {"index": "7", "text": "x", "label": "1"}),
        (",index,text", "7,8,x", {"column 1": "7", "index": "8", "text": "x"}),
        ("text,, ,label", "x,,,1", {"text": "x", "label": "1"}),
    ],
)
def test_columns_without_a_name(
    tmp_path: Path, header: str, row: str, tree: dict[str, Any]
) -> None:
    assert read(tmp_path, f"{header}\n{row}\n", "a.csv") == [tree]


def test_filled_columns_without_a_name_are_named_as_unused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(",text,\n0,x,y\n1,z,\n")
    unused = ["keys of a data line that are not used: 'column 3' (1 time)"]
    assert read_file(path, "causal-lm").unused == unused


@pytest.mark.parametrize("label", ["0.25", "-1.5", ".5", "1e-3", "2E5", "0,25", "3.14159"])
def test_a_fraction_is_no_class(tmp_path: Path, label: str) -> None:
    with pytest.raises(InputError, match=f"'label' must be a word or a whole number, got {label}"):
        read(tmp_path, f"text\tlabel\nx\t{label}\n")


@pytest.mark.parametrize("label", ["1", "1.0", "-1", "007", "v1.5", "1.2.3", "50%", "e5", "1-2"])
def test_whole_numbers_and_words_are_classes(tmp_path: Path, label: str) -> None:
    assert read(tmp_path, f"text\tlabel\nx\t{label}\n") == [{"text": "x", "label": label}]
