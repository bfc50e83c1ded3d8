"""Every format is read as the same samples; what is not read is refused in one line."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import records
from trainer.data.formats import read_records
from trainer.data.records import DataError, Problems
from trainer.data.samples import read_samples
from trainer.system.errors import InputError

ROWS = [{"input": "größe, 'x'", "label": 0}, {"input": 'two\nlines; "q"\ttab', "label": 1}]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def zstd(content: bytes) -> bytes:
    pa = pytest.importorskip("pyarrow", reason="the launcher-only install has none")
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as out:
        out.write(content)
    return buffer.getvalue().to_pybytes()


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.mkdir("data")
        archive.writestr("data/rows.jsonl", content)
        archive.writestr("__MACOSX/data/._rows.jsonl", b"\0\1")
    return buffer.getvalue()


def table(delimiter: str, first: str = "", mark: str = "") -> bytes:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, ["input", "label"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return (mark + first + buffer.getvalue()).encode()


def array(indent: int | None) -> bytes:
    return b"\n" + json.dumps(ROWS, indent=indent).encode() + b"\n"


PACKERS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
    "zip": zipped,
}
FORMATS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": TEXT.encode,
    "mark.jsonl": lambda: codecs.BOM_UTF8 + TEXT.encode(),
    "utf-16.jsonl": lambda: TEXT.encode("utf-16"),
    "utf-16-be.jsonl": lambda: ("\ufeff" + TEXT).encode("utf-16-be"),
    "utf-16-le.jsonl": lambda: TEXT.encode("utf-16-le"),
    "utf-32.jsonl": lambda: TEXT.encode("utf-32"),
    "a.json": lambda: array(None),
    "indented.json": lambda: array(2),
    "array.jsonl": lambda: array(None),
    "a.csv": lambda: table(","),
    "a.tsv": lambda: table("\t"),
    "semicolons.csv": lambda: table(";", mark="\ufeff"),
    "excel.csv": lambda: table(";", first="sep=;\r\n"),
    "named-otherwise": lambda: table(";"),
    "unicode-text.txt.csv": lambda: table("\t").decode().encode("utf-16"),
    **{f"a.jsonl.{name}": lambda pack=pack: pack(TEXT.encode()) for name, pack in PACKERS.items()},
    **{f"a.csv.{name}": lambda pack=pack: pack(table(";")) for name, pack in PACKERS.items()},
    "twice.gz": lambda: gzip.compress(gzip.compress(TEXT.encode())),
    "wide.gz": lambda: gzip.compress(TEXT.encode("utf-16")),
    "zip.gz": lambda: gzip.compress(zipped(TEXT.encode())),
    "padded.xz": lambda: (
        lzma.compress(TEXT[:20].encode()) + bytes(8) + lzma.compress(TEXT[20:].encode()) + bytes(4)
    ),
    "members.gz": lambda: gzip.compress(TEXT[:20].encode()) + gzip.compress(TEXT[20:].encode()),
}


def read(path: Path) -> list[tuple[str, int | None]]:
    return [(sample.text, sample.label) for sample in read_samples(path, "classify", 2)]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read_as_the_same_samples(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"it's 100%#{name}"
    path.write_bytes(FORMATS[name]())
    assert read(path) == [(row["input"], row["label"]) for row in ROWS]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x80\x04\x95", "is a pickle"),
        (b"SQLite format 3\0", "is an SQLite database"),
        (b"%PDF-1.7", "is a PDF"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        (b'{\n "input": "x"\n}\n', "objects of several lines"),
        (b"PK\x03\x04 and no archive", "is truncated or damaged"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_archives_of_other_things_are_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    with zipfile.ZipFile(tmp_path / "a.xlsx", "w") as book:
        book.writestr("[Content_Types].xml", "<Types/>")
    deep = TEXT.encode()
    for _ in range(5):
        deep = gzip.compress(deep)
    (tmp_path / "deep").write_bytes(deep)
    for name, says in {
        "a.tar.gz": "tar archive",
        "a.xlsx": "office document",
        "deep": "3 times",
    }.items():
        with pytest.raises(InputError, match=says):
            read(tmp_path / name)


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("share", [0.2, 0.6, 0.97])
def test_a_cut_archive_is_never_read_as_a_shorter_one(
    tmp_path: Path, pack: str, share: float
) -> None:
    content = PACKERS[pack]("".join(TEXT.replace("x", str(n)) for n in range(2000)).encode())
    path = tmp_path / f"a.{pack}"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(InputError, match=r"is truncated or damaged: .+; copy it again"):
        read(path)


def test_text_in_another_encoding_that_is_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(TEXT.encode("utf-16")[:-1])
    with pytest.raises(InputError, match="is truncated or damaged"):
        read(path)


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ("input,label\nfine,0\na,b,1\nc\n", ["3: has 3 fields", "4: has 1 fields"]),
        ('input,label\n"two\nlines",0\nx,y,z\n', ["4: has 3 fields, the header has 2"]),
        ('input,label\n"a"b,0\nc,1\n', ["2: not CSV: ',' expected"]),
        (
            'input,label\nfine,0\n"never closed,1\nx,1\n',
            ["3: not CSV: a quotation mark opens a field and is not"],
        ),
        ("input,label\nx\0y,0\n", ["2: contains a NUL byte"]),
        ("input,input,label\nx,y,0\n", ["1: the header has the column 'input' twice"]),
        (b"input,label\nfine,0\ngr\xf6\xdfe,1\n", ["3: not valid UTF-8 at byte 3; save it as"]),
    ],
)
def test_bad_rows_of_a_table_are_named_by_their_first_line(
    tmp_path: Path, rows: str | bytes, problems: list[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    with pytest.raises(DataError) as caught:
        read(path)
    found = [str(caught.value), *caught.value.details]
    assert len(found) == len(problems)
    for line, problem in zip(found, problems, strict=True):
        assert line.startswith(f"{path}:{problem}")


def test_fields_of_a_table_are_text_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    long = "a long transcript line\n" * 8000
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ["text", "label"],
                [long, "3"],
                ["007", "-1"],
                ["1.0", "2.0"],
                ["x", "spam"],
                ["y", ""],
            ]
        )
    problems = Problems()
    trees = [record.tree for record in read_records(path, problems)]
    problems.raise_if_any()
    assert trees == [
        {"text": long, "label": "3"},
        {"text": "007", "label": "-1"},
        {"text": "1.0", "label": "2.0"},
        {"text": "x", "label": "spam"},
        {"text": "y", "label": None},
    ]


def test_a_conversation_in_a_cell_is_json(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a, b"}]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "messages"], ["1", json.dumps(turns)], ["2", "[{'role'}]"]]
        )
    with pytest.raises(DataError, match=r":3: 'messages' is a string that is not JSON") as caught:
        read_samples(path, "causal-lm")
    assert "\n" not in str(caught.value)


# Python's own writer leaves a lone carriage return unquoted, and its reader refuses it.
CELLS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=12
) | st.just("a\r\nb")


@given(
    rows=st.lists(st.tuples(CELLS, CELLS), max_size=5),
    delimiter=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_a_table_written_by_python_or_a_spreadsheet_reads_equal(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    delimiter: str,
    quoting: Any,
    end: str,
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, quoting=quoting, lineterminator=end)
        writer.writerows([("prompt", "completion"), *rows])
    problems = Problems()
    trees = [record.tree for record in read_records(path, problems)]
    problems.raise_if_any()
    assert trees == [{"prompt": prompt, "completion": said} for prompt, said in rows]


@given(
    st.lists(
        st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.text()), max_size=9
    )
)
def test_an_array_has_the_elements_that_json_finds(
    tmp_path_factory: pytest.TempPathFactory, values: list[object]
) -> None:
    path = tmp_path_factory.getbasetemp() / "array.json"
    trees = [{"value": value} for value in values]
    for indent in (None, 1):
        path.write_text(json.dumps(trees, indent=indent, ensure_ascii=True))
        problems = Problems()
        assert [record.tree for record in read_records(path, problems)] == trees
        problems.raise_if_any()


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_an_array_is_read_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(records, "PIECE", piece)
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"n": 12345, "text": "gr\xc3\xb6\xc3\x9fe"}, {"n": -0.5e10}]')
    trees = [record.tree for record in read_records(path, Problems())]
    assert trees == [{"n": 12345, "text": "größe"}, {"n": -0.5e10}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a": 1}, {"a": }]', "element 2: not JSON: Expecting value (line 1)"),
        (
            '[{"a": 1},\n {"a": 2}',
            "element 3: not JSON: expected ',', got the end of the file (line 2)",
        ),
        ('[{"a": 1}\n{"a": 2}]', "element 2: not JSON: expected ',', got '{' (line 2)"),
        ('[{"a": 1}] x', "element 2: not JSON: the array ends, and more follows (line 1)"),
        ('[{"a": 1, "a": 2}]', "element 1: has the key 'a' twice (line 1)"),
        ('[{"a": "x', "element 1: not JSON: Unterminated string starting (line 1)"),
    ],
)
def test_a_damaged_array_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    problems = Problems()
    list(read_records(path, problems))
    with pytest.raises(DataError) as caught:
        problems.raise_if_any()
    assert str(caught.value) == f"{path}: {problem}"


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("One.\nstill one.\n\n  \nTwo.\r\n\r\nThree", ["One.\nstill one.", "Two.", "Three"]),
        ("a line\n  another\nthe last\n", ["a line", "  another", "the last"]),
        ("\n\nonly one\n\n", ["only one"]),
        (
            "Dear input, text: a letter\n\n[is] no table",
            ["Dear input, text: a letter", "[is] no table"],
        ),
    ],
)
def test_a_plain_text_has_paragraphs(tmp_path: Path, text: str, samples: list[str]) -> None:
    for name in ("a.txt", "a.MD"):
        path = tmp_path / name
        path.write_bytes(text.encode())
        assert [sample.text for sample in read_samples(path, "causal-lm")] == samples
    lines = text.split("\n")
    for sample in read_samples(path, "causal-lm"):
        assert lines[sample.line - 1].rstrip("\r") == sample.text.split("\n")[0]


@pytest.mark.parametrize("line", ["Hello, world", "not json; at all", "x"])
def test_text_with_commas_is_no_table(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl:1: not JSON"):
        read(path)


@pytest.mark.parametrize("how", ["replaced", "appended", "removed"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(TEXT * 3)
    found = read_records(path, Problems())
    next(found)
    if how == "replaced":
        (tmp_path / "b").write_text(TEXT * 3)
        (tmp_path / "b").rename(path)
    elif how == "appended":
        with path.open("a") as file:
            file.write(TEXT)
    else:
        path.unlink()
    with pytest.raises(InputError, match="changed, replaced or removed while it was read"):
        list(found)


COLUMNS = {"input": "body", "label": "intent"}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_columns_are_named_by_the_config(tmp_path: Path, suffix: str) -> None:
    rows = [{"intent": n % 2, "body": f"text {n}", "input": "not this"} for n in range(3)]
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = read_samples(path, "classify", 2, COLUMNS)
    assert [(sample.text, sample.label) for sample in samples] == [
        (f"text {n}", n % 2) for n in range(3)
    ]
    with pytest.raises(
        InputError, match=r"no key 'bdy' \(data\.columns\.input\); it has 'intent', "
    ):
        read_samples(path, "classify", 2, {**COLUMNS, "input": "bdy"})


def test_an_archive_of_several_files_is_read_as_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is held out is not learned, nor a card beside the data."""
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("train", "test"):
            archive.writestr(f"set/{name}.jsonl", json.dumps({"text": name}) + "\n")
        archive.writestr("set/README.md", "A card.\n")
        archive.writestr("__MACOSX/set/._train.jsonl", b"\0")
    caplog.set_level("INFO")
    for _ in range(2):
        assert [sample.text for sample in read_samples(path, "causal-lm")] == ["train"]
    out = "documentation (1: set/README.md), split test (1: set/test.jsonl)"
    said = f"{path}: reads train.jsonl; leaves out: {out}"
    assert caplog.messages.count(said) == 1
