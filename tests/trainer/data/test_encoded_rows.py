"""Large data is encoded once a host, and its rows are those that each process would encode."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.waiting import wait_for
from trainer.config.run import RunConfig, load
from trainer.data import encoded_rows
from trainer.data.encoded_rows import EncodedFile, open_encoded
from trainer.data.encoder import Encoder
from trainer.data.holdout import hold_out
from trainer.data.samples import read_file
from trainer.data.survey import check_conversations, check_encoded, survey, survey_encoded
from trainer.data.tokens import make_dataset
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
from trainer.config.run import load
from trainer.data import encoded_rows
encoded_rows.LEAST_BYTES = 0
encoded_rows.PIECE_BYTES = 4096
path, model = map(Path, sys.argv[1:])
from tests.trainer.data.test_encoded_rows import configured
found = encoded_rows.open_encoded(path, configured(path, model), model)
print("found" if found else "none", flush=True)
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded_rows, "LEAST_BYTES", 0)
    monkeypatch.setattr(encoded_rows, "PIECE_BYTES", 4096)
    yield
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]


def rows(count: int = 300) -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = []
    for n in range(count):
        turns = [{"role": "user", "content": f"What is {n % 90}?"}]
        turns += [{"role": "assistant", "content": f"It is <|im_end|> {n}. " * (1 + n % 5)}]
        kinds.append({"messages": turns, "odd": n} if n % 3 else {"messages": turns * 2})
        kinds.append({"text": f"Text {n % 100} ü"})
        kinds.append({"prompt": f"Ask {n}: ", "completion": f"answer {n} " * (1 + n % 30)})
    return kinds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoded")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": json.dumps(row)}) + "\n" for row in rows(50)))
    init_model(data, folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    return folder / "model"


def configured(path: Path, model: Path, fraction: float = 0.1) -> RunConfig:
    own = {"data.train": str(path), "data.validation": None, "data.max_seq_len": LIMIT}
    own |= {"data.validation_fraction": fraction, "model.path": str(model), "task": "causal-lm"}
    return load("quickstart").with_settings({"num_classes": None, **own})


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("\n\n".join(json.dumps(row) for row in found))
    return path


def opened(path: Path, model: Path, fraction: float = 0.1) -> EncodedFile | None:
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]  # as in a new process
    return open_encoded(path, configured(path, model, fraction), model)


@pytest.mark.parametrize("fraction", [0.1, 0.0])
def test_rows_and_lines_are_those_of_the_reader_in_memory(
    tmp_path: Path, model: Path, fraction: float
) -> None:
    path = write(tmp_path / "a b.jsonl", rows())
    found = opened(path, model, fraction)
    assert found is not None
    encoder = Encoder(model)
    whole = read_file(path, "causal-lm")
    train, held = hold_out(whole, fraction) if fraction else (whole, None)
    assert (held is None) == (found.held_out is None)
    for file, encoded in ((train, found.train), (held, found.held_out)):
        if file is None or encoded is None:
            continue
        plain = make_dataset(file, encoder, "causal-lm", LIMIT)
        assert len(plain) == len(encoded) > 50
        for index in range(len(plain)):
            one, other = plain[index], encoded[index]
            assert isinstance(one.labels, np.ndarray)
            assert isinstance(other.labels, np.ndarray)
            np.testing.assert_array_equal(one.input_ids, other.input_ids)
            np.testing.assert_array_equal(one.labels, other.labels)
            assert other.input_ids.dtype == other.labels.dtype == np.int32
            assert not other.input_ids.flags.writeable
        with pytest.raises(IndexError):
            encoded[len(encoded)]
    checks = [line for file in (train, held) if file for line in check_conversations(file, encoder)]
    assert check_encoded(found, encoder) == checks
    assert any("special token <|im_end|>" in line for line in checks)
    summary = survey(train, held, encoder, LIMIT, None)
    assert survey_encoded(found, None, LIMIT) == summary
    assert any("duplicate" in line for line in summary)
    assert any("cut" in line for line in summary)
    assert any("'odd'" in line for line in summary)
    other = write(tmp_path / "validation.jsonl", rows(5))
    separate = read_file(other, "causal-lm")
    assert survey_encoded(found, separate, LIMIT) == survey(train, separate, encoder, LIMIT, None)


def test_an_entry_is_made_once_and_again_after_damage_or_a_change(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(20))
    assert opened(path, model)
    (entry,) = cache_folder.entries()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_a, **_k: pytest.fail("it is there"))
        assert opened(path, model)
    cache_folder._HELD.close()  # pyright: ignore[reportPrivateUsage]
    damaged = entry.path / "rows.arrow"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    again = opened(path, model)
    assert again is not None
    assert damaged.read_bytes() != content
    write(path, rows(21))
    changed = opened(path, model)
    assert changed is not None
    assert len(changed.train) > len(again.train)
    assert len(cache_folder.entries()) == 2


def test_what_is_irregular_is_left_to_the_reader_in_memory(tmp_path: Path, model: Path) -> None:
    bad = {"messages": [{"role": "user", "content": "no answer"}]}
    for name, more in {"bad": bad, "number": {"text": 5}}.items():
        path = write(tmp_path / f"{name}.jsonl", [*rows(20), more])
        assert opened(path, model) is None
        with pytest.raises(InputError, match=f"{name}.jsonl:121: "):
            read_file(path, "causal-lm")
    assert opened(write(tmp_path / "one.jsonl", [{"text": "same"}] * 3), model) is None
    assert not cache_folder.entries()
    assert not list(cache_folder.cache_root().glob(".tmp-*")), "nothing is left of them"


def test_a_full_disk_is_a_line_and_the_run_goes_on_without(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Disk, "write", full)
    caplog.set_level(logging.WARNING)
    assert opened(write(tmp_path / "a.jsonl", rows(20)), model) is None
    (record,) = caplog.records
    assert "No space left on device; the rows of" in record.getMessage()
    assert not list(cache_folder.cache_root().glob(".tmp-*"))


def test_data_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(20))
    pieces = encoded_rows._Build._pieces  # pyright: ignore[reportPrivateUsage]

    def changing(self: Any) -> Iterator[bytes]:
        write(path, rows(19))
        yield from pieces(self)

    monkeypatch.setattr(encoded_rows._Build, "_pieces", changing)  # pyright: ignore[reportPrivateUsage]
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
    assert not cache_folder.entries()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate()[0] for each in both] == ["found\n"] * 2
    assert len(cache_folder.entries()) == 1
    assert not list(cache_folder.cache_root().glob(".tmp-*")), "the next writer removes it"


def test_a_process_that_is_killed_while_it_encodes_is_a_line(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Remembered(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)

    pieces = encoded_rows._Build._pieces  # pyright: ignore[reportPrivateUsage]

    def killing(self: Any) -> Iterator[bytes]:
        for piece in pieces(self):
            yield piece
            made[0].kill()

    monkeypatch.setattr(subprocess, "Popen", Remembered)
    monkeypatch.setattr(encoded_rows._Build, "_pieces", killing)  # pyright: ignore[reportPrivateUsage]
    assert opened(write(tmp_path / "a.jsonl", rows(100)), model) is None
    assert "a process that encodes rows was killed; the rows of" in caplog.text
    assert not list(cache_folder.cache_root().glob(".tmp-*"))
