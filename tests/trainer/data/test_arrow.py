"""Parquet and Arrow are read by their columns: what is not used does no harm."""

from __future__ import annotations

import datetime
import decimal
import gzip
import io
import json
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.config.run import load_config
from trainer.data import arrow
from trainer.data.formats import read_records
from trainer.data.labelling import Labelling, find_labels, with_names
from trainer.data.records import DataError, Problems
from trainer.data.samples import hash_files, read_file, read_samples
from trainer.system.errors import InputError

pa = pytest.importorskip("pyarrow", reason="the launcher-only install has none")
from pyarrow import ipc, parquet  # noqa: E402 - there only if pyarrow is

COUNT = 200  # more than are decoded at once
TIME = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
ODD = {
    "timestamp": TIME,
    "picture": b"\x89PNG",
    "price": decimal.Decimal("1.5"),
    "embedding": [0.5, 1.5],
    "day": TIME.date(),
}
"""Columns that JSON has no values for, or that no sample has."""


def rows() -> list[dict[str, Any]]:
    return [{"input": f"größe {n}", "label": n % 2} | ODD for n in range(COUNT)]


def as_parquet(table: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, **options)
    return buffer.getvalue()


def as_stream(table: Any) -> bytes:
    buffer = io.BytesIO()
    with ipc.new_stream(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return buffer.getvalue()


def as_file(table: Any) -> bytes:
    buffer = io.BytesIO()
    with ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return buffer.getvalue()


def in_zip(table: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.parquet", as_parquet(table))
    return buffer.getvalue()


FORMATS: dict[str, Callable[[Any], bytes]] = {
    "parquet": as_parquet,
    "small groups": lambda table: as_parquet(table, row_group_size=30, compression="zstd"),
    "stream": as_stream,
    "file": as_file,
    "parquet in gzip": lambda table: gzip.compress(as_parquet(table)),
    "stream in gzip": lambda table: gzip.compress(as_stream(table)),
    "parquet in zip": in_zip,
}


def write(path: Path, *trees: dict[str, Any], form: str = "parquet") -> Path:
    path.write_bytes(FORMATS[form](pa.Table.from_pylist(list(trees))))
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_samples_and_other_columns_are_said(tmp_path: Path, form: str) -> None:
    file = read_file(write(tmp_path / "a", *rows(), form=form), "classify", 2)
    assert [(s.text, s.label) for s in file.samples] == [(t["input"], t["label"]) for t in rows()]
    (line,) = file.unused
    for name in ("picture", "price", "embedding", "day"):
        assert f"{name!r} (200 times)" in line
    assert "timestamp" not in line  # harmless by its name
    inner = "/a.parquet" if form == "parquet in zip" else ""
    assert file.samples[150].place(file.path) == f"{tmp_path}/a{inner}: row 151"


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
@pytest.mark.parametrize("column", ["label", "rating"])
def test_classes_that_a_file_names_keep_names_and_order(
    tmp_path: Path, form: str, column: str
) -> None:
    """As `datasets` writes a ClassLabel; the file has no line of the last class."""
    columns, names = ({} if column == "label" else {"label": column, "text": "text"}), tuple("zax")

    def named(path: Path, names: tuple[str, ...], labels: list[int | None]) -> Path:
        features = {"text": {"_type": "Value"}, column: {"_type": "ClassLabel", "names": names}}
        told = {"huggingface": json.dumps({"info": {"features": features}})}
        table = pa.table({"text": ["one"] * len(labels), column: labels})
        path.write_bytes(FORMATS[form](table.replace_schema_metadata(told)))
        return path

    path = named(tmp_path / "one.parquet", names, [1, 0])
    assert find_labels(path, (), columns) == Labelling("classify", names)
    assert find_labels(path, tuple("axyz"), columns) == Labelling("classify", tuple("axyz"))
    settings = {"model.path": "m", "data.train": str(path), "num_classes": 3}
    assert (
        with_names(load_config(None, settings | {"data.columns": columns}), ()).class_names == names
    )
    for classes, labels in (
        (names, [1, 0]),
        (tuple("axz"), [0, 2]),
        (3, [1, 0]),
        (("p", "q"), [1, 0]),
    ):
        file = read_file(path, "classify", classes, columns)
        assert [sample.label for sample in file.samples] == labels
    with pytest.raises(DataError, match="must be one of the classes 'a', 'b', got 'z'"):
        read_file(path, "classify", ("a", "b"), columns)
    with pytest.raises(DataError, match="must be from 0 to 2, got -1"):
        read_file(named(tmp_path / "none.parquet", names, [-1]), "classify", names, columns)
    named(tmp_path / "two.parquet", ("a", "z"), [1, 0])
    (tmp_path / "none.parquet").unlink()
    with pytest.raises(InputError, match=r"two\.parquet: row 1: names other classes"):
        find_labels(tmp_path, (), columns)


@pytest.mark.parametrize("form", ["parquet", "stream", "file"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_cut_file_is_never_read_as_a_shorter_one(tmp_path: Path, form: str, share: float) -> None:
    path = write(tmp_path / "a", *rows(), form=form)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(InputError, match=r"is truncated or damaged: .+; copy it again") as caught:
        read_samples(path, "classify", 2)
    assert "\n" not in str(caught.value)


def test_a_stream_that_ends_between_two_batches_is_cut(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    table = pa.Table.from_pylist(rows())
    with ipc.new_stream(buffer, table.schema) as writer:
        writer.write_batch(table.to_batches()[0])
        whole = buffer.tell()
        writer.write_batch(table.to_batches()[0])
    path = tmp_path / "a.arrow"
    path.write_bytes(buffer.getvalue()[:whole])
    with pytest.raises(InputError, match="no end mark"):
        read_samples(path, "classify", 2)


@pytest.mark.parametrize(("name", "kind"), [("timestamp", "timestamp"), ("picture", "binary")])
def test_a_used_column_of_another_type_is_refused_by_name(
    tmp_path: Path, name: str, kind: str
) -> None:
    path = write(tmp_path / "a.parquet", *rows())
    with pytest.raises(InputError, match=rf"column '{name}' \(data\.columns\.input\) is {kind}"):
        read_samples(path, "classify", 2, {"input": name, "label": "label"})
    path = write(tmp_path / "b.parquet", {"text": ODD[name]})
    with pytest.raises(InputError, match=rf"column 'text' is {kind}"):
        read_samples(path, "causal-lm")


def test_a_refused_column_is_refused_by_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": "x", "image": b"\x89PNG"})
    with pytest.raises(DataError, match="row 1: 'image' is not text"):
        read_samples(path, "causal-lm")
    assert read_samples(path, "causal-lm", columns={"text": "text"})[0].text == "x"
    path = write(tmp_path / "b.parquet", {"text": "x", "weight": None})
    assert read_samples(path, "causal-lm")[0].text == "x"


def test_columns_that_are_no_keys_are_refused_with_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"body": "x", "intent": 1})
    with pytest.raises(InputError, match=r"it has 'body', 'intent'; name them with data\.columns"):
        read_samples(path, "classify", 2)
    mapped = read_samples(path, "classify", 2, {"input": "body", "label": "intent"})
    assert [(sample.text, sample.label) for sample in mapped] == [("x", 1)]


def test_a_conversation_with_times_in_its_turns(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q", "timestamp": TIME, "n": None},
        {"role": "assistant", "content": "a", "timestamp": None, "n": 1},
    ]
    path = write(tmp_path / "a.parquet", {"conversation": turns})
    (sample,) = read_samples(path, "causal-lm", columns={"messages": "conversation"})
    assert [(turn.role, turn.content) for turn in sample.messages] == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    assert sample.digest()


def test_null_is_an_absent_key_and_bad_rows_are_named(tmp_path: Path) -> None:
    trees = [
        {"instruction": "i", "input": None, "output": "o"},
        {"instruction": "i", "input": "x", "output": None},
    ]
    with pytest.raises(DataError) as caught:
        read_samples(write(tmp_path / "a.parquet", *trees), "causal-lm")
    assert str(caught.value).startswith(f"{tmp_path}/a.parquet: row 2: ")
    assert "\n" not in str(caught.value)


def test_categories_and_large_texts_are_text(tmp_path: Path) -> None:
    table = pa.table(
        {
            "input": pa.array(["a", "b", "a"], pa.large_string()).dictionary_encode(),
            "label": pa.array([0, 1, 0], pa.int8()),
        }
    )
    (tmp_path / "a.parquet").write_bytes(as_parquet(table))
    found = read_samples(tmp_path / "a.parquet", "classify", 2)
    assert [(sample.text, sample.label) for sample in found] == [("a", 0), ("b", 1), ("a", 0)]


def test_a_small_file_of_huge_rows_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["x" * (64 << 20)], "other": ["y" * (64 << 20)]})
    path.write_bytes(as_parquet(table, compression="zstd", use_dictionary=False))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match=r"column 'text' has 64 MiB a row; a record may have 10"):
        read_samples(path, "causal-lm")


def test_few_rows_are_decoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary makes a small file of long rows."""
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(pa.table({"text": ["x" * (1 << 20)] * 300})))
    assert path.stat().st_size < 1 << 20
    found = read_records(path, Problems())
    next(found)
    before = pa.total_allocated_bytes()
    for _ in found:
        assert pa.total_allocated_bytes() <= before + (2 * arrow.ROWS << 20)


def packed(table: Any, new: Any = ipc.new_file, **options: Any) -> bytes:
    buffer = io.BytesIO()
    with new(buffer, table.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, **({"max_chunksize": 100} if new is ipc.new_stream else {}))
    return buffer.getvalue()


def dictionary(text: str, count: int) -> Any:
    places = pa.array([0] * count, pa.int8())
    return pa.DictionaryArray.from_arrays(places, pa.array([text]))


TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
LONG = "x" * (4 << 20)
BOMBS: dict[str, Callable[[], bytes]] = {
    # One row of a million turns, each of them nothing.
    "empty turns": lambda: as_parquet(
        pa.table({"messages": pa.array([[None] * 1_000_000], pa.list_(TURN))}), compression="zstd"
    ),
    # One text, to which each of a row's turns refers.
    "one text of many turns": lambda: as_parquet(
        pa.table({"messages": [[{"role": "user", "content": LONG}] * 60]}), compression="zstd"
    ),
    "a page": lambda: as_parquet(
        pa.table({"text": [LONG] * 65}),
        compression="zstd",
        use_dictionary=False,
        data_page_size=1 << 30,
    ),
    "a dictionary": lambda: as_parquet(
        pa.table({"text": dictionary("x" * (12 << 20), 100)}),
        compression="zstd",
        store_schema=False,
    ),
    "a packed batch": lambda: packed(pa.table({"text": [LONG] * 10}), compression="zstd"),
    "rows of one text": lambda: packed(
        pa.table({"text": dictionary("x" * (12 << 20), 100)}), compression="zstd"
    ),
    "lists of nothing": lambda: packed(
        pa.table(
            {
                "text": ["a"],
                "messages": pa.FixedSizeListArray.from_arrays(pa.nulls(5_000_000), 5_000_000),
            }
        )
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_makes_no_large_records(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "_PAGE", 200 << 20)
    monkeypatch.setattr(arrow, "_BATCH", 32 << 20)
    path = tmp_path / "a"
    path.write_bytes(BOMBS[name]())
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()

    def read() -> None:
        for _ in read_records(path, Problems()):
            assert pa.total_allocated_bytes() < before + (200 << 20)

    with pytest.raises(InputError, match=r"may have 10 MiB|unpacks to more than") as caught:
        read()
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_long_rows_of_a_dictionary_are_read_one_by_one(tmp_path: Path) -> None:
    """Each is within the limit of a record, and a batch of them is large."""
    path = tmp_path / "a.parquet"
    turns = [{"role": "user", "content": "x" * (2 << 20)}, {"role": "assistant", "content": "y"}]
    table = pa.table({"messages": [turns, turns[1:]] * 100, "a.b": ["z" * (3 << 20)] * 200})
    path.write_bytes(as_parquet(table, compression="zstd"))
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    count = 0
    for record in read_records(path, Problems(), {"messages": "messages", "text": "a.b"}):
        assert len(record.tree["messages"]) == 2 - count % 2
        assert len(record.tree["text"]) == 3 << 20
        assert record.number == (count := count + 1)
        assert pa.total_allocated_bytes() < before + (64 << 20)
    assert count == 200


@pytest.mark.parametrize("new", [ipc.new_file, ipc.new_stream])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_packed_arrow_is_read(tmp_path: Path, new: Any, compression: str) -> None:
    path = tmp_path / "a.arrow"
    texts = pa.array(["one", "two"] * 100)
    table = pa.table({"input": texts.cast(pa.string_view()), "output": texts.dictionary_encode()})
    path.write_bytes(packed(table, new, compression=compression))
    found = [record.tree for record in read_records(path, Problems())]
    assert found == [{"input": text, "output": text} for text in texts.to_pylist()]


def test_texts_that_end_elsewhere_are_damage(tmp_path: Path) -> None:
    """pyarrow reads an Arrow file's offsets as they are: another place of the memory."""
    path = tmp_path / "a.arrow"
    content = as_file(pa.table({"text": ["first", "second", "third"]}))
    ends = struct.pack("<4i", 0, 5, 11, 16)
    assert content.count(ends) == 1
    path.write_bytes(content.replace(ends, struct.pack("<4i", 0, 5, 1 << 30, 16)))
    with pytest.raises(InputError, match="is truncated or damaged: "):
        list(read_records(path, Problems()))


def save_to_disk(folder: Path, *parts: list[dict[str, Any]]) -> None:
    """Write a folder as `datasets.Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(parts):05}.arrow" for n in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        (folder / name).write_bytes(as_stream(pa.Table.from_pylist(part)))
    (folder / "cache-1234.arrow").write_bytes(b"a cache of an earlier map()")
    (folder / "dataset_info.json").write_text('{"features": {}}')
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


def test_a_folder_of_save_to_disk_is_read_in_its_order(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_to_disk(tmp_path / "set" / "train", [{"text": "a"}, {"text": "b"}], [{"text": "c"}])
    save_to_disk(tmp_path / "set" / "test", [{"text": "not learned"}])
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    caplog.set_level("INFO")
    file = read_file(tmp_path / "set", "causal-lm")
    assert [sample.text for sample in file.samples] == ["a", "b", "c"]
    assert f"{tmp_path}/set: reads 2 files; leaves out: split test (1: test)" in caplog.text
    part = tmp_path / "set" / "train" / "data-00001-of-00002.arrow"
    assert file.samples[2].place(file.path) == f"{part}: row 1"
    assert [s.text for s in read_samples(tmp_path / "set" / "test", "causal-lm")] == ["not learned"]
    whole = hash_files([tmp_path / "set"]).hexdigest()
    assert whole == hash_files([part.parent]).hexdigest()
    part.write_bytes(as_stream(pa.table({"text": ["other"]})))
    assert whole != hash_files([tmp_path / "set"]).hexdigest()


def test_a_large_row_group_is_read_in_pieces(tmp_path: Path) -> None:
    """Most writers make one group of a million rows, which are gigabytes."""
    path = tmp_path / "a.parquet"
    texts = [random.Random(n).randbytes(2**9).hex() for n in range(2**14)]
    parquet.write_table(pa.table({"text": texts}), path, use_dictionary=False, compression="none")
    assert parquet.ParquetFile(path).num_row_groups == 1
    tracemalloc.start()  # pyarrow reads this file through Python
    try:
        assert sum(1 for _ in read_records(path, Problems())) == len(texts)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 2**24
    assert peak < 2**22
