"""Prompts of large data are encoded rows, and are what prompts in memory are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.data.prompts import turns_before
from trainer.distill.answers.author import Prompts, PromptTokens
from trainer.distill.answers.description import prompts_digest
from trainer.system.errors import InputError
from trainer.system.storage import cache_folder

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainer.data.row_entry.MOST_PROCESSES", 1)
    yield monkeypatch
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(n: int, *more: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"mkdir ü{n} " * (1 + n % 9)}, *more]}


def test_prompts_of_rows_are_those_in_memory(
    tmp_path: Path, model: Path, large: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [{"body": f"echo {n}", "odd": 1} for n in range(40)]
    columns = {"text": "body"}
    paths = [write(tmp_path / "a.jsonl", rows)]
    paths.append(tmp_path / "a.csv")
    paths[-1].write_text("body\n" + "".join(f'"echo, {n}"\n' for n in range(40)))
    answer = {"role": "assistant", "content": "not asked"}
    talk = [asked(1), asked(2, answer), {"prompt": "ls ", "completion": "-l"}, {"text": "so"}]
    paths.append(write(tmp_path / "talk.jsonl", talk * 9))
    for path in paths:
        names = {} if path.stem == "talk" else columns
        with large.context() as patch:
            plain = Prompts.read_prompts(path, names, model)
            patch.setattr("trainer.data.encoded_rows.LEAST_BYTES", 0)
            encoded = Prompts.read_prompts(path, names, model)
        assert isinstance(encoded.tokens, PromptTokens)
        assert list(encoded.tokens) == list(plain.tokens)
        assert encoded.longest == plain.longest
        assert prompts_digest(encoded.samples) == prompts_digest(plain.samples)
        assert [*map(turns_before, encoded.samples)] == [*map(turns_before, plain.samples)]


def test_tools_are_named_by_their_line(
    tmp_path: Path, model: Path, large: pytest.MonkeyPatch
) -> None:
    large.setattr("trainer.data.encoded_rows.LEAST_BYTES", 0)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    path = write(tmp_path / "a.jsonl", [asked(1), asked(2) | {"tools": [tool]}])
    with pytest.raises(InputError, match=r"a\.jsonl:2: has tools or other keys of turns"):
        Prompts.read_prompts(path, {}, model)
