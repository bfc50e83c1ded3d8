"""What docs/logits-format.md promises, by its own examples: readable by others, and how exactly."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests import ROOT
from tests.trainer.tiny_logits import SCHEMES, draw_logits, score, tiny_description, tiny_folder
from trainer.distill.logits.scores import Scheme, Window

DOC = ROOT / "docs" / "logits-format.md"


def examples(language):
    return re.findall(rf"```{language}\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)


def ask(query):
    import duckdb

    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def windows(tmp_path, monkeypatch):
    """Write a folder OUT into the current directory, and return its windows."""
    monkeypatch.chdir(tmp_path)
    description = tiny_description(SCHEMES["topk"])
    folder = tiny_folder(Path("OUT"), description)
    return [window for plan in description.shards for window in folder.read_shard(plan.number)]


def test_the_example_for_pandas(windows):
    [code] = [each for each in examples("python") if "pandas" in each]
    names = {}
    exec(code, names)
    scores = windows[0].scores
    assert names["best"] == scores.ids[scores.offsets[1:-1]].tolist()
    assert len(names["best"]) == 8


def test_the_example_for_pyarrow(windows):
    [code] = [each for each in examples("python") if "pyarrow" in each]
    names = {}
    exec(code, names)
    scores = windows[0].scores
    np.testing.assert_array_equal(names["offsets"][: len(scores.offsets)], scores.offsets)
    np.testing.assert_array_equal(names["logprobs"][: len(scores.ids)], scores.logprobs)
    assert Scheme(**names["scheme"]) == SCHEMES["topk"]


def test_the_example_for_duckdb(windows):
    [query] = examples("sql")
    [(agreement, kept)] = ask(query)
    positions = [
        (window.tokens[t], window.scores.ids[window.scores.offsets[t]], window.scores.tail[t])
        for window in windows
        for t in range(1, len(window.tokens))
    ]
    assert agreement == pytest.approx(np.mean([token == best for token, best, _ in positions]))
    assert kept == pytest.approx(np.mean([1 - float(tail) for *_, tail in positions]))


@pytest.mark.parametrize("kind", SCHEMES)
def test_every_reader_sees_the_same(tmp_path, kind):
    import pandas

    description = tiny_description(SCHEMES[kind])
    folder = tiny_folder(tmp_path, description)
    path = folder.shard_path(2) / "logits.parquet"
    frame = pandas.read_parquet(path)
    rows = ask(f"SELECT * FROM '{path}'")
    columns = [name for name, *_ in ask(f"DESCRIBE SELECT * FROM '{path}'")]
    assert columns == list(frame.columns) == pq.read_schema(path).names
    for place, window in enumerate(folder.read_shard(2)):
        row = dict(zip(columns, rows[place], strict=True))
        assert row["document"] == frame["document"][place] == window.document
        assert row["tokens"] == frame["tokens"][place].tolist() == window.tokens.tolist()
        for name in ("tail", "dropped", "entropy"):
            wanted = getattr(window.scores, name)
            np.testing.assert_array_equal(frame[name][place], wanted)
            np.testing.assert_array_equal(np.float32(row[name]), wanted)
        offsets = window.scores.offsets
        for name in {"ids", "logprobs", "counts"}.intersection(columns):
            for t in range(len(window.tokens)):
                wanted = getattr(window.scores, name)[offsets[t] : offsets[t + 1]]
                np.testing.assert_array_equal(frame[name][place][t], wanted)
                np.testing.assert_array_equal(np.array(row[name][t], wanted.dtype), wanted)


def test_the_metadata_is_what_the_document_lists(tmp_path):
    description = tiny_description(SCHEMES["topk"])
    folder = tiny_folder(tmp_path, description)
    metadata = pq.read_schema(folder.shard_path(1) / "logits.parquet").metadata
    listed = re.findall(r"^\| `(motley\.\w+)` \| (?:`\{(.*?)\}`)?", DOC.read_text(), re.MULTILINE)
    assert {key.encode() for key, _ in listed} == set(metadata)
    for key, fields in listed:
        if fields:
            assert list(json.loads(metadata[key.encode()])) == fields.split(", ")


@pytest.mark.parametrize(("values", "bound"), [("float16", 2.5e-4), ("float32", 1e-6)])
@pytest.mark.parametrize("kind", ["topk", "full"])
def test_stored_against_live(tmp_path, kind, values, bound):
    """Live log-probabilities are kept to 1e-6 in float32; half precision costs < 1e-4 nats."""
    rng = np.random.default_rng(21)
    positions, scheme = 2000, SCHEMES[kind]
    live = score(draw_logits(rng, positions), scheme, rng)
    description = tiny_description(
        scheme, values, lengths=((positions + 1,),), shards=((0, 1),), vocabulary=40
    )
    folder = tiny_folder(tmp_path, description, write=[])
    folder.write_shard(0, [Window(0, 0, np.zeros(positions + 1, np.int32), live)])
    stored = folder.read_shard(0)[0].scores
    assert live.logprobs is not None
    assert stored.logprobs is not None
    np.testing.assert_array_equal(stored.ids, live.ids)
    if values == "float32":
        np.testing.assert_allclose(stored.logprobs, live.logprobs, rtol=0, atol=1e-6)
    p, q = np.exp(live.logprobs.astype(float)), np.exp(stored.logprobs.astype(float))
    np.testing.assert_allclose(q, p, rtol=0, atol=bound)
    kept = live.counts == 0
    at = np.repeat(np.arange(positions + 1), np.diff(live.offsets))
    p, q = (
        np.where(kept, values, 0) / np.bincount(at, np.where(kept, values, 0))[at]
        for values in (p, q)
    )
    each = np.where(kept, p * np.log(np.where(kept, p / np.where(kept, q, 1), 1)), 0)
    divergence = np.bincount(at, each)[1:]
    assert divergence.min() > -1e-12
    assert divergence.max() < 1e-4
