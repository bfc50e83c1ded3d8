"""Data in another format is named as what it is, and the command that is named converts it."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.data.documents import Documents
from trainer.data.samples import read_samples
from trainer.system.errors import InputError

ROWS = [{"input": "größe, 'x'", "label": 0}, {"input": "two\nlines", "label": 1}]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def parquet(path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the launcher-only install has none")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.jsonl", TEXT)


def table(delimiter: str) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["input", "label"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)

    return write


def encoded(encoding: str, mark: str = "") -> Callable[[Path], object]:
    return lambda path: path.write_bytes((mark + TEXT).encode(encoding))


def array(indent: int | None) -> Callable[[Path], object]:
    return lambda path: path.write_text("\n" + json.dumps(ROWS, indent=indent))


def packed(pack: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pack(TEXT.encode()))


@pytest.mark.parametrize(
    ("name", "write", "what"),
    [
        ("it's data.parquet", parquet, "is Parquet"),
        ("a.jsonl.gz", packed(gzip.compress), "is gzip"),
        ("a.jsonl", packed(gzip.compress), "is gzip"),
        ("a.bz2", packed(bz2.compress), "is bzip2"),
        ("a.xz", packed(lzma.compress), "is xz"),
        ("a.zip", zipped, "is a ZIP archive"),
        ("a.jsonl", encoded("utf-16"), "is UTF-16,"),
        ("a.jsonl", encoded("utf-16-be", "\ufeff"), "is UTF-16,"),
        ("a.jsonl", encoded("utf-16-le"), "is UTF-16LE"),
        ("a.jsonl", encoded("utf-32"), "is UTF-32,"),
        ("a.json", array(None), "is a JSON array"),
        ("a.jsonl", array(2), "is a JSON array"),
        ("a.csv", table(","), "is CSV"),
        ("a.tsv", table("\t"), "is TSV"),
        ("a.jsonl", table(";"), "is CSV"),
    ],
)
def test_another_format_is_named_with_the_command_that_converts_it(
    tmp_path: Path, name: str, write: Callable[[Path], object], what: str
) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(InputError) as caught:
        read_samples(path, "classify", 2)
    message = str(caught.value)
    assert message.startswith(f"{path}: {what}")
    assert "\n" not in message
    command = message.partition("convert it: ")[2]
    if shutil.which(command.split()[0]) is None:
        pytest.skip(f"needs {command.split()[0]}")
    before = set(tmp_path.iterdir())
    subprocess.run(["sh", "-c", command], check=True, timeout=60)
    (converted,) = set(tmp_path.iterdir()) - before
    found = [(s.text, s.label) for s in read_samples(converted, "classify", 2)]
    assert found == [(row["input"], row["label"]) for row in ROWS]


def test_a_corpus_names_them_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(TEXT, encoding="utf-16")
    with pytest.raises(InputError, match=r"a\.jsonl: is UTF-16, expected"):
        Documents([tmp_path])


@pytest.mark.parametrize("line", ["Hello, world", "not json; at all", "x"])
def test_text_with_commas_is_no_table(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError, match=r"a\.jsonl:1: not JSON"):
        read_samples(path, "classify", 2)
