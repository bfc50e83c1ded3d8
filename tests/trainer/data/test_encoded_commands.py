"""`trainer inspect-data` and `trainer evaluate` read large data by its encoded rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.trainer.small_model import write_model
from trainer.checkpoint.trained_model import load_trained
from trainer.commands.inspect_data import inspect_data
from trainer.data import encoded_rows, row_entry
from trainer.evaluate.scoring import EvaluationScores, score_file
from trainer.replica.backend import Compute
from trainer.system.storage import cache_folder

pytestmark = pytest.mark.long

MEASURED = """
import json, re, sys
from pathlib import Path
from trainer.config.run import load_config
from trainer.data.encoder import Encoder
from trainer.data.inspection import inspect_data
from trainer.data import encoded_rows
from trainer.data.encoded_rows import read_data
encoded_rows.LEAST_BYTES = 0

def own():
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(n) for n in re.findall(r"Private_Dirty: +([0-9]+)", text))

path, model = sys.argv[1:]
settings = {"data.train": path, "data.validation": path, "data.max_seq_len": 64}
settings |= {"model.path": model, "task": "causal-lm", "num_classes": None}
config, encoder = load_config("quickstart").with_settings(settings), Encoder(Path(model))
before = own()
found = inspect_data(config, encoder, 2)
file = read_data(path, config, encoder)
rows = file.open_dataset(encoder, "causal-lm", 64)
tokens = sum(len(rows[index].input_ids) for index in range(len(rows)))
print(json.dumps([own() - before, found.samples, found.repetitions.in_both, tokens]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_entry, "MOST_PROCESSES", 2)
    yield
    cache_folder._PINNED.clear()  # pyright: ignore[reportPrivateUsage]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turns(n: int) -> dict[str, Any]:
    asked = {"role": "user", "content": f"What is {n}?"}
    return {"messages": [asked, {"role": "assistant", "content": f"It is {n}. " * (1 + n % 30)}]}


def texts(count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"text": f"mkdir -p build-{n % 70}"} for n in range(count)]
    found += [{"prompt": f"Ask {n}: ", "completion": "so " * (n % 40) + "!"} for n in range(count)]
    return [*found, *map(turns, range(count)), {"text": "seen", "odd": 1}]


def labelled(count: int) -> list[dict[str, Any]]:
    return [{"text": f"echo {n % 70}", "label": ("ham", "spam")[n % 3 // 2]} for n in range(count)]


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("rows", [texts(90), labelled(150)])
def test_inspection_of_rows_is_that_of_samples_in_memory(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    with_model: bool,
) -> None:
    data = write(tmp_path / "a.jsonl", rows)
    held_out = write(tmp_path / "v.jsonl", [*rows[3:40], rows[0] | {"text": "new"}])
    command = [str(data), "--validation", str(held_out), "--max-seq-len", "24", "--json"]
    command += ["--samples", "7", *(["--model", str(model)] if with_model else [])]
    in_memory = CliRunner().invoke(inspect_data, command)
    assert not cache_folder.list_entries()
    monkeypatch.setattr(encoded_rows, "LEAST_BYTES", 0)
    encoded = CliRunner().invoke(inspect_data, command)
    assert len(cache_folder.list_entries()) == 2
    assert in_memory.exit_code == encoded.exit_code == 0
    assert json.loads(encoded.stdout) == json.loads(in_memory.stdout)
    assert json.loads(encoded.stdout)["in_both"] > 30


def scored(trained: Path, data: Path, **options: Any) -> EvaluationScores:
    return score_file(
        load_trained(trained, max_seq_len=24), data, Compute("cpu", threads=1), **options
    )


def test_scores_of_rows_are_those_of_samples_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "a.jsonl", [{"body": f"mkdir -p build-{n}"} for n in range(300)])
    model = write_model(tmp_path / "model", write(tmp_path / "words.jsonl", texts(20)[:20]))
    in_memory = scored(model, data, columns={"text": "body"})
    monkeypatch.setattr(encoded_rows, "LEAST_BYTES", 0)
    assert scored(model, data, columns={"text": "body"}) == in_memory
    (entry,) = cache_folder.list_entries()
    # What a checkpoint has beside its tokenizer is another for each.
    (model / "run.json.note.json").write_text("{}")
    assert scored(model, data, columns={"text": "body"}) == in_memory
    assert [each.path for each in cache_folder.list_entries()] == [entry.path]


def test_memory_does_not_grow_with_rows(tmp_path: Path, model: Path) -> None:
    found: list[int] = []
    for count in (2_000, 20_000):
        data = write(tmp_path / f"{count}.jsonl", [turns(n) for n in range(count)])
        for _ in range(2):  # the second finds the rows
            command = [sys.executable, "-P", "-c", MEASURED, str(data), str(model)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        own, samples, shared, tokens = json.loads(done.stdout)
        assert (samples, shared) == (count, count)
        assert tokens > 4 * count
        found.append(own)
    assert found[1] - found[0] < 18_000 * 100, "a row in memory takes 300 bytes or more"
