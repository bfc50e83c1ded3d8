"""The planned bytes of a token against those of real shards."""

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.tiny_logits import draw_logits, score, tiny_description
from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import Values
from trainer.distill.logits.scores import Scheme, Window
from trainer.distill.logits.shard import shard_schema
from trainer.planning.logits_size import StoredScores, bytes_per_token, column_bytes

VOCABULARY, SHARP = 4096, 1.7
KEPT = {
    "topk": StoredScores(),
    "kept": StoredScores(tail_samples=0),
    "sampled": StoredScores(scheme="sampled"),
    "full": StoredScores(scheme="full"),
}
TOKENS = {"topk": 512, "kept": 512, "sampled": 2048, "full": 64}
"""Enough that the metadata of a file hardly counts."""


def scheme_of(kept: StoredScores) -> Scheme:
    return Scheme(
        kind=kept.scheme, top_k=kept.top_k, tail_samples=kept.tail_samples, samples=kept.samples
    )


@pytest.mark.parametrize("values", ["float16", "float32"])
@pytest.mark.parametrize("name", KEPT)
def test_a_shard_has_the_planned_bytes_a_token(tmp_path: Path, name: str, values: Values) -> None:
    kept = StoredScores(**{**vars(KEPT[name]), "values": values})
    tokens, scheme, rng = TOKENS[name], scheme_of(kept), np.random.default_rng(0)
    described = tiny_description(scheme, values, [[tokens]], [(0, 1)], VOCABULARY)
    logits = SHARP * draw_logits(rng, tokens - 1, VOCABULARY)
    ids = rng.integers(VOCABULARY, size=tokens, dtype=np.int32)
    folder = LogitsFolder(tmp_path)
    folder.write_description(described)
    written = folder.write_shard(0, [Window(0, 0, ids, score(logits, scheme, rng))])
    size = (written / "logits.parquet").stat().st_size / tokens
    assert bytes_per_token(kept, VOCABULARY) == pytest.approx(size, rel=0.2)


@pytest.mark.parametrize("name", KEPT)
def test_every_column_of_a_token_is_planned(name: str) -> None:
    described = tiny_description(scheme_of(KEPT[name]))
    columns = shard_schema(described, described.shards[0]).names
    assert [*column_bytes(KEPT[name], 40)] == [
        each for each in columns if each not in ("document", "start")
    ]


@pytest.mark.parametrize(
    ("kept", "values", "published"),
    [
        (StoredScores(top_k=128, tail_samples=0), "float16", 424.4),
        (StoredScores(tail_samples=0), "float16", 231.1),
        (StoredScores(tail_samples=0), "float32", 326.0),
        (StoredScores(), "float16", 263.9),
        (StoredScores(), "float32", 370.8),
        (StoredScores(scheme="sampled"), "float16", 40.4),
        (StoredScores(scheme="full"), "float16", 226_599),
        (StoredScores(scheme="full"), "float32", 461_958),
    ],
)
def test_a_large_vocabulary_as_measured(
    kept: StoredScores, values: Values, published: float
) -> None:
    """docs/logits-format.md: Qwen's 151,936 tokens, whose shards are too large for a test."""
    planned = bytes_per_token(StoredScores(**{**vars(kept), "values": values}), 151_936)
    assert planned == pytest.approx(published, rel=0.15)
