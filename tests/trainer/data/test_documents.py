"""A corpus numbers its documents the same way everywhere, and hashes what they say."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tracemalloc
from pathlib import Path

import pytest

from trainer.data.documents import Documents
from trainer.data.records import DataError
from trainer.data.shapes import ChatMessage
from trainer.system.errors import InputError
from trainer.system.process.child import PROGRESS_VARIABLE
from trainer.system.storage import progress


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def lines(*trees: object) -> str:
    return "".join(json.dumps(tree) + "\n" for tree in trees)


def texts(documents: Documents) -> list[str]:
    return [document.text for document in documents]


def test_folders_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "Z.py", "sub/c.py", "sub/deep/d.py", "alpha/e.py", "é.py"):
        write(tmp_path / name, f"# {name}\r\n")
    documents = Documents([tmp_path])
    names = ["Z.py", "a.py", "alpha/e.py", "b.py", "sub/c.py", "sub/deep/d.py", "é.py"]
    assert texts(documents) == [f"# {name}\r\n" for name in names]
    assert [documents.describe_location(index) for index in range(7)] == [
        str(tmp_path / n) for n in names
    ]
    assert documents.digest == Documents([tmp_path]).digest


def test_reading_reports_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A teacher whose corpus takes minutes to read is waited for."""
    seen: list[str] = []
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setattr(progress, "REPORT_INTERVAL", 0.0)
    monkeypatch.setattr(progress, "replace_file", lambda _path, line: seen.append(line))
    path = write(tmp_path / "a.jsonl", lines(*({"text": str(n)} for n in range(1000))))
    Documents([path])
    assert seen[0] == "reading a.jsonl: 1 rows"
    assert seen[-1] == "reading a.jsonl: 1,000 rows"


def test_the_given_order_counts(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.txt", "one"), write(tmp_path / "2.txt", "two")
    assert texts(Documents([two, one])) == ["two", "one"]
    assert Documents([two, one]).digest != Documents([one, two]).digest


def test_lines_are_documents(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write(
        tmp_path / "a.jsonl",
        "\ufeff" + lines({"text": "ü"}) + "\n" + lines({"messages": turns}, {"input": "i"}),
    )
    documents = Documents([write(tmp_path / "first.txt", "first"), path])
    assert len(documents) == 4
    assert [documents[index].text for index in (3, 1, 0)] == ["i", "ü", "first"]
    assert documents[2].messages == (ChatMessage("user", "q"), ChatMessage("assistant", "a"))
    assert documents.describe_location(2) == f"{path}:3"
    with pytest.raises(IndexError, match="document 4 of 4"):
        documents[4]


def test_the_digest_covers_content_and_its_bounds_alone(tmp_path: Path) -> None:
    def digest(name: str, *trees: object) -> str:
        return Documents([write(tmp_path / f"{name}.jsonl", lines(*trees))]).digest

    turns = [{"role": "assistant", "content": "ab"}]
    digests = {
        digest("a", {"text": "ab"}, {"text": "c"}),
        digest("b", {"text": "a"}, {"text": "bc"}),
        digest("c", {"text": "abc"}),
        digest("d", {"messages": turns}),
        digest("e", {"text": json.dumps([["assistant", "ab"]])}),
    }
    assert len(digests) == 5
    # Where a document lies, and keys beside its text, are nobody's business.
    assert digest("f", {"id": 7, "input": "abc"}) in digests
    assert Documents([write(tmp_path / "g.txt", "abc")]).digest in digests


def test_what_is_no_document_is_counted(tmp_path: Path) -> None:
    write(tmp_path / "good.md", "\ufeffgood")
    write(tmp_path / ".git/config", "hidden folder")
    write(tmp_path / ".hidden", "hidden file")
    write(tmp_path / "latin.txt", b"caf\xe9")
    write(tmp_path / "zeros.bin", b"a\0b")
    write(tmp_path / "blank.py", " \n")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    documents = Documents([tmp_path])
    assert texts(documents) == ["good"]
    assert documents.left_out == {"hidden": 2, "not text": 2, "empty": 1}


def test_errors_name_the_place(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", lines({"text": "x"}) + "{oops\n" + lines({"txt": "y"}))
    with pytest.raises(DataError, match=r"bad\.jsonl:2: not JSON") as caught:
        Documents([tmp_path])
    assert caught.value.details[0].startswith(f"{bad}:3: its keys")
    for path, message in (
        (tmp_path / "none", "no such data file"),
        (write(tmp_path / "latin.txt", b"caf\xe9"), "latin.txt: not text"),
        (write(tmp_path / "blank.txt", ""), "blank.txt: empty"),
        (write(tmp_path / "nothing.jsonl", "\n"), "no documents: every file is empty"),
        (write(tmp_path / "notes.txt.gz", gzip.compress(b"x")), "not text; unpack it"),
    ):
        with pytest.raises(InputError, match=message):
            Documents([path])


def test_a_document_that_changed_is_an_error_not_another_text(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", lines({"text": "one"}, {"text": "two"}))
    page = write(tmp_path / "b.txt", "page")
    documents = Documents([rows, page])
    write(rows, lines({"text": "uno"}, {"text": "three"}))
    write(page, "")
    for index, source in enumerate((f"{rows}:1", f"{rows}:2", page)):
        with pytest.raises(InputError, match=f"^{source}: has changed since"):
            documents[index]


def test_the_texts_are_not_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "big.jsonl", lines(*({"text": "x" * 10_000} for _ in range(2000))))
    tracemalloc.start()
    documents = Documents([path])
    total = sum(len(document.text) for document in documents)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 20_000_000
    assert peak < 2_000_000


def table(key: str) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows([["id", key], [1, "one,\n1"], [2, "zwei ü"]])
    return buffer.getvalue().encode()


ROWS = [{"id": 1, "text": "one,\n1"}, {"id": 2, "text": "zwei ü"}]
FORMS = {
    "a.csv": table("text"),
    "no-suffix": table("text"),
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "array.jsonl": json.dumps(ROWS).encode(),
    "packed.jsonl": gzip.compress(lines(*ROWS).encode()),
    "lines": lines(*ROWS).encode(),
    "a.csv.gz": gzip.compress(table("text")),
    "wide.jsonl": lines(*ROWS).encode("utf-16"),
}


@pytest.mark.parametrize("name", FORMS)
def test_records_of_every_format_are_the_same_documents(tmp_path: Path, name: str) -> None:
    documents = Documents([write(tmp_path / name, FORMS[name])])
    assert [documents[index].text for index in (1, 0)] == ["zwei ü", "one,\n1"]
    assert documents.describe_location(1).startswith(f"{tmp_path / name}:")
    assert documents.digest == Documents([write(tmp_path / "b.jsonl", lines(*ROWS))]).digest


def test_conversations_with_tools_are_found_again_in_a_table(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"messages": turns, "tools": [{"type": "function", "function": {"name": "f"}}]}
    plain = Documents([write(tmp_path / "a.jsonl", lines(row))])
    copied = Documents([write(tmp_path / "a.json", json.dumps([row, {"text": "x"}]))])
    assert copied[0] == plain[0]
    assert copied[0].tools
    assert copied.describe_location(1) == f"{tmp_path / 'a.json'}: element 2"


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_columns_name_the_keys_of_documents(tmp_path: Path, name: str) -> None:
    rows = lines(*({"text": "no", "body": row["text"]} for row in ROWS)).encode()
    path = write(tmp_path / name, table("body") if name == "a.csv" else rows)
    assert texts(Documents([path], {"text": "body"})) == ["one,\n1", "zwei ü"]
    with pytest.raises(InputError, match=r"data\.columns: 'txt' is not a key"):
        Documents([path], {"txt": "body"})


def test_a_folder_with_data_is_read_as_training_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "d/train.csv", table("text"))
    write(tmp_path / "d/test.jsonl", lines({"text": "held out"}))
    write(tmp_path / "d/README.md", "a card")
    write(tmp_path / "code/package.json", "{}")
    write(tmp_path / "code/a.js", "let a")
    assert texts(Documents([tmp_path / "d"])) == ["one,\n1", "zwei ü"]
    assert texts(Documents([tmp_path / "code"])) == ["let a", "{}"]


def test_a_copied_document_outlives_its_file(tmp_path: Path) -> None:
    documents = Documents([path := write(tmp_path / "a.csv", table("text"))])
    path.unlink()
    assert texts(documents) == ["one,\n1", "zwei ü"]
