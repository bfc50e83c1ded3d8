"""Large data is encoded once a host, and its rows are those that each process would encode."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.trainer.data.encoded_formats import (
    conversations,
    labelled,
    preferences,
    rows,
    texts,
    write_as,
)
from tests.waiting import wait_for
from trainer.config.run import RunConfig, load_config
from trainer.data import encoded_rows, row_entry
from trainer.data.data_file import DataFile
from trainer.data.encoded_rows import EncodedFile, open_encoded, read_data
from trainer.data.encoder import Encoder
from trainer.data.row_entry import RowSettings
from trainer.data.sample_file import SampleFile
from trainer.data.samples import read_file
from trainer.data.survey import check_conversations, survey
from trainer.init_model import init_model
from trainer.system.errors import InputError
from trainer.system.storage import cache_folder
from trainer.system.storage.atomic_folder import Disk

pytestmark = pytest.mark.long

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMIT = 48
ELSEWHERE = """
import sys
from pathlib import Path
from trainer.config.run import load_config
from trainer.data import encoded_rows, row_entry
from trainer.data.encoder import Encoder
encoded_rows.LEAST_BYTES = 0
row_entry.PIECE_BYTES = 4096
path, model = map(Path, sys.argv[1:])
from tests.trainer.data.test_encoded_rows import configured
settings = row_entry.RowSettings.of_run(configured(path, model))
found = encoded_rows.open_encoded(path, settings, Encoder(model))
print("found" if found else "none", flush=True)
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded_rows, "LEAST_BYTES", 0)
    monkeypatch.setattr(row_entry, "PIECE_BYTES", 4096)
    monkeypatch.setattr(row_entry, "MOST_PROCESSES", 2)
    yield
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": json.dumps(row)}) + "\n" for row in rows(50)))
    init_model(data, folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return folder / "model"


def configured(path: Path, model: Path, task: str = "causal-lm", classes: Any = None) -> RunConfig:
    own = {"data.train": str(path), "data.validation": None, "data.max_seq_len": LIMIT}
    own |= {"model.path": str(model), "task": task, "num_classes": None}
    own |= {"class_names": classes, "training.evaluate_every": 0}
    return load_config("quickstart").with_settings(own)


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in found))
    return path


def opened(path: Path, model: Path, fraction: float = 0.1) -> EncodedFile | None:
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]  # as in a new process
    return open_encoded(path, RowSettings.of_run(configured(path, model)), Encoder(model), fraction)


def check_same(
    file: DataFile | None, encoded: DataFile | None, encoder: Encoder, config: RunConfig
) -> None:
    """Check that a replica reads the same of rows as of samples in memory."""
    assert (file is None) == (encoded is None)
    if file is None or encoded is None:
        return
    assert isinstance(encoded, EncodedFile)
    limit = config.data.max_seq_len
    plain = file.open_dataset(encoder, config.task, limit)
    rows_ = encoded.open_dataset(encoder, config.task, limit)
    assert len(plain) == len(rows_) > 5
    assert file.labels == encoded.labels
    for index in range(len(plain)):
        one, other = plain[index], rows_[index]
        assert len(one.answers) == len(other.answers)
        for mine, theirs in zip(one.answers, other.answers, strict=True):
            np.testing.assert_array_equal(mine.input_ids, theirs.input_ids)
            np.testing.assert_array_equal(mine.labels, theirs.labels)
            assert type(mine.labels) is type(theirs.labels)
            assert theirs.input_ids.dtype == np.int32
            assert not theirs.input_ids.flags.writeable
    with pytest.raises(IndexError):
        rows_[len(rows_)]


@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_rows_and_lines_are_those_of_the_reader_in_memory(
    tmp_path: Path, model: Path, fraction: float
) -> None:
    path = write(tmp_path / "a b.jsonl", rows())
    found = opened(path, model, fraction)
    assert found is not None
    encoder, config = Encoder(model), configured(path, model)
    whole = read_file(path, "causal-lm")
    train, held = whole.hold_out(fraction) if fraction else (whole, None)
    own, own_held = found.hold_out(fraction) if fraction else (found, None)
    check_same(train, own, encoder, config)
    check_same(held, own_held, encoder, config)
    for file, encoded in ((train, own), (held, own_held)):
        if file and encoded:
            checks = check_conversations(file, encoder)
            assert check_conversations(encoded, encoder) == checks
            assert any("special token <|im_end|>" in line for line in checks)
    summary = survey(train, held, encoder, LIMIT, None)
    assert survey(own, own_held, encoder, LIMIT, None) == summary
    assert any("duplicate" in line for line in summary)
    assert any("cut" in line for line in summary)
    assert any("'odd'" in line for line in summary)
    other = write(tmp_path / "validation.jsonl", rows(5))
    separate, again = read_file(other, "causal-lm"), opened(other, model, 0.0)
    expected = survey(train, separate, encoder, LIMIT, None)
    assert survey(own, separate, encoder, LIMIT, None) == expected
    assert survey(own, again, encoder, LIMIT, None) == expected
    assert survey(train, again, encoder, LIMIT, None) == expected
    assert survey(None, again, encoder, LIMIT, None) == survey(None, separate, encoder, LIMIT, None)


CASES = [
    *(("causal-lm", texts, name) for name in ("a.csv", "a.json", "a.jsonl.gz", "a.jsonl.zst")),
    *(("causal-lm", conversations, name) for name in ("a.parquet", "a.arrow", "folder")),
    ("causal-lm", labelled, "a.txt"),
    *(("classify", labelled, name) for name in ("a.csv", "a.jsonl", "a.parquet")),
    *(("dpo", preferences, name) for name in ("a.jsonl", "a.json")),
]


@pytest.mark.parametrize(("task", "make", "name"), CASES)
def test_every_format_and_task_is_encoded_once_and_read_as_in_memory(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    make: Callable[[int], list[dict[str, Any]]],
    name: str,
) -> None:
    monkeypatch.setattr(row_entry, "MOST_PROCESSES", 1)
    path = write_as(tmp_path / name, make(120))
    config = configured(path, model, task, ["good", "bad", "odd"] if task == "classify" else None)
    encoder = Encoder(model)
    plain = read_file(path, config.task, config.classes)
    file = read_data(str(path), config, Encoder(model), 0.2)
    assert isinstance(file, EncodedFile)
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as patch:  # as a second process, or when a run goes on
        patch.setattr(subprocess, "Popen", lambda *_a, **_k: pytest.fail("it is there"))
        again = read_data(str(path), config, Encoder(model), 0.2)
    assert isinstance(again, EncodedFile)
    train, held = again.hold_out(0.2)
    mine, mine_held = plain.hold_out(0.2)
    check_same(mine, train, encoder, config)
    check_same(mine_held, held, encoder, config)
    assert check_conversations(train, encoder) == check_conversations(mine, encoder)
    summary = survey(mine, mine_held, encoder, LIMIT, config.classes)
    assert survey(train, held, encoder, LIMIT, config.classes) == summary


def test_class_numbers_that_a_file_names_are_those_of_the_run(tmp_path: Path, model: Path) -> None:
    found = [{"text": f"It is {n}", "label": n % 3} for n in range(30)]
    feature = {"names": ["odd", "good", "bad"], "_type": "ClassLabel"}
    info = {"info": {"features": {"label": feature}}}
    table = pa.Table.from_pylist(found).replace_schema_metadata({"huggingface": json.dumps(info)})
    path = tmp_path / "a.parquet"
    parquet.write_table(table, path)
    config = configured(path, model, "classify", ["good", "bad", "odd"])
    file = read_data(str(path), config, Encoder(model))
    assert isinstance(file, EncodedFile)
    check_same(read_file(path, "classify", config.classes), file, Encoder(model), config)
    assert [file.rows[n].labels for n in range(3)] == [2, 0, 1]


def test_labels_of_two_kinds_are_left_to_the_reader_in_memory(tmp_path: Path, model: Path) -> None:
    found = [{"text": f"It is {n} " * 20, "label": "1" if n == 90 else "good"} for n in range(100)]
    path = write_as(tmp_path / "a.csv", found)
    config = configured(path, model, "classify", ["good", "bad", "odd"])
    with pytest.raises(InputError, match="'label' is a number, that of line 2 is a word"):
        read_data(str(path), config, Encoder(model))


def test_memory_does_not_grow_with_cached_rows(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_entry, "PIECE_BYTES", 1 << 20)
    held: list[int] = []
    for count in (500, 5000):
        path = write_as(tmp_path / f"{count}.csv", texts(count))
        config = configured(path, model)
        assert read_data(str(path), config, Encoder(model))
        cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]
        tracemalloc.start()
        file = read_data(str(path), config, Encoder(model))
        assert isinstance(file, EncodedFile)
        assert sum(len(file.rows[index].input_ids) for index in range(count)) > 10 * count
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(file.rows) == count
    assert held[1] - held[0] < 4500 * 4, "a row in memory takes 300 bytes or more"


def flip_a_bit(entry: Path) -> None:
    content = bytearray((entry / "rows.arrow").read_bytes())
    content[len(content) // 2] ^= 1
    (entry / "rows.arrow").write_bytes(content)


DAMAGE: list[Callable[[Path], object]] = [
    flip_a_bit,
    lambda entry: os.truncate(entry / "rows.arrow", 100),
    lambda entry: (entry / "parts.json").unlink(),
    lambda entry: (entry / "manifest.json").write_text("{"),
    lambda entry: (entry / "0.bin").write_bytes(b""),
]


def test_an_entry_is_made_once_and_again_after_damage_or_a_change(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(20))
    assert opened(path, model)
    (entry,) = cache_folder.list_entries()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_a, **_k: pytest.fail("it is there"))
        assert opened(path, model)
    intact = {each.name: each.read_bytes() for each in entry.path.iterdir()}
    for damage in DAMAGE:
        cache_folder._HELD.close()  # pyright: ignore[reportPrivateUsage]
        damage(entry.path)
        again = opened(path, model)
        assert again is not None
        assert {each.name: each.read_bytes() for each in entry.path.iterdir()} == intact
    write(path, rows(21))
    changed = opened(path, model)
    assert changed is not None
    assert len(changed.rows) > 50
    assert len(cache_folder.list_entries()) == 2


def test_what_is_irregular_is_left_to_the_reader_in_memory(tmp_path: Path, model: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "no answer"}]}
    for name, more in {"bad": bad, "number": {"text": 5}}.items():
        path = write(tmp_path / f"{name}.jsonl", [*rows(20), more])
        assert opened(path, model) is None
        with pytest.raises(InputError, match=f"{name}.jsonl:121: "):
            read_file(path, "causal-lm")
    assert opened(write(tmp_path / "one.jsonl", [{"text": "same"}] * 3), model) is None
    assert not cache_folder.list_entries()
    assert not list(cache_folder.cache_root().glob(".tmp-*")), "nothing is left of them"


@pytest.mark.parametrize(
    ("operation", "calls"), [("write", 1), ("write", 4), ("sync", 1), ("rename", 1)]
)
def test_a_full_disk_is_a_line_and_the_run_goes_on_without(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    calls: int,
) -> None:
    work, left = getattr(Disk, operation), calls

    def full(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return work(*arguments)

    monkeypatch.setattr(Disk, operation, full)
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "a.jsonl", rows(60))
    file = read_data(str(path), configured(path, model), Encoder(model), 0.1)
    assert isinstance(file, SampleFile)
    assert left < 1
    assert len(file.samples) == 180
    (record,) = caplog.records
    assert "No space left on device; the rows of" in record.getMessage()
    assert not cache_folder.list_entries()
    assert not list(cache_folder.cache_root().glob(".tmp-*"))
    monkeypatch.setattr(Disk, operation, work)
    assert opened(path, model), "once there is room again"


def test_a_cache_that_cannot_be_made_is_a_line_and_the_run_goes_on_without(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "file"))
    path = write(tmp_path / "a.jsonl", rows(5))
    file = read_data(str(path), configured(path, model), Encoder(model))
    assert isinstance(file, SampleFile)
    assert "the cache is a file; set MOTLEY_CACHE to a folder to write to; the rows of" in (
        caplog.text
    )


def test_data_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(20))
    pieces = row_entry.RowEntry._iter_pieces  # pyright: ignore[reportPrivateUsage]

    def changing(self: Any) -> Iterator[bytes]:
        write(path, rows(19))
        yield from pieces(self)

    monkeypatch.setattr(row_entry.RowEntry, "_iter_pieces", changing)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(InputError, match="was changed while it was read; read it again"):
        opened(path, model)


def test_a_killed_writer_leaves_nothing_and_two_at_once_make_one_entry(
    tmp_path: Path, model: Path
) -> None:
    path = write(tmp_path / "a.jsonl", rows())
    command = [sys.executable, "-c", ELSEWHERE, str(path), str(model)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    root = cache_folder.cache_root()
    wait_for(lambda: [*root.glob(".tmp-*/rows.arrow")] or first.poll(), "the first rows")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not cache_folder.list_entries()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0] for each in both] == ["found\n"] * 2
    assert len(cache_folder.list_entries()) == 1
    assert not list(cache_folder.cache_root().glob(".tmp-*")), "the next writer removes it"


def test_a_process_that_is_killed_while_it_encodes_is_a_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)

    pieces = row_entry.RowEntry._iter_pieces  # pyright: ignore[reportPrivateUsage]

    def killing(self: Any) -> Iterator[bytes]:
        for piece in pieces(self):
            yield piece
            made[0].kill()

    monkeypatch.setattr(subprocess, "Popen", Remembered)
    monkeypatch.setattr(row_entry.RowEntry, "_iter_pieces", killing)  # pyright: ignore[reportPrivateUsage]
    assert opened(write(tmp_path / "a.jsonl", rows(100)), model) is None
    assert "a process that encodes rows was killed; the rows of" in caplog.text
    assert not list(cache_folder.cache_root().glob(".tmp-*"))
