"""A corpus numbers its documents the same way everywhere, and hashes what they say."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from trainer.data.documents import Documents
from trainer.data.records import DataError
from trainer.data.shapes import ChatMessage
from trainer.system.errors import InputError


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
    names = ["Z.py", "a.py", "b.py", "é.py", "alpha/e.py", "sub/c.py", "sub/deep/d.py"]
    assert texts(documents) == [f"# {name}\r\n" for name in names]
    assert [documents.source(index) for index in range(7)] == [str(tmp_path / n) for n in names]
    assert documents.digest == Documents([tmp_path]).digest


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
    assert documents.source(2) == f"{path}:3"
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
    assert f"{bad}:3: its keys" in str(caught.value)
    for path, message in (
        (tmp_path / "none", "no such data file or folder"),
        (write(tmp_path / "latin.txt", b"caf\xe9"), "latin.txt: not text"),
        (write(tmp_path / "blank.txt", ""), "blank.txt: empty"),
        (write(tmp_path / "nothing.jsonl", "\n"), "no text files and no JSON Lines"),
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
