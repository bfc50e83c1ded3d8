"""Small folders of teacher logits for tests, from random logits, by the plain definitions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainer.distill.logits.dataset import LogitsFolder
from trainer.distill.logits.description import (
    CorpusInfo,
    Description,
    ShardPlan,
    TeacherInfo,
    TokenizerInfo,
    Values,
)
from trainer.distill.logits.scores import Scheme, Scores, Window

VOCABULARY = 40
SCHEMES = {
    "topk": Scheme(kind="topk", top_k=6, tail_samples=3),
    "kept": Scheme(kind="topk", top_k=6, tail_samples=0),
    "sampled": Scheme(kind="sampled", samples=20),
    "full": Scheme(kind="full"),
}
LENGTHS = ((9, 4), (7,), (1,), (12,), (12, 12, 3), (5,))
"""Tokens of each document's windows."""
SHARDS = ((0, 2), (2, 4), (4, 6))
"""Document ranges."""


def draw_logits(
    rng: np.random.Generator, rows: int, vocabulary: int = VOCABULARY
) -> NDArray[np.float64]:
    return rng.normal(scale=3.0, size=(rows, vocabulary))


def score(
    logits: NDArray[np.float64],
    scheme: Scheme,
    rng: np.random.Generator,
    student_ids: NDArray[np.int32] | None = None,
) -> Scores:
    """Return what `scheme` keeps of `logits[t - 1]`, the prediction of token t; `[T - 1, V]`.

    `student_ids` are the teacher's ids of the student's tokens; without them it has all.
    """
    logits = logits / scheme.temperature
    probability = np.exp(logits - logits.max(axis=1, keepdims=True))
    probability /= probability.sum(axis=1, keepdims=True)
    if student_ids is not None:
        probability = probability[:, student_ids]
    rows = [_row(p, scheme, rng) for p in probability]
    dropped = [max(0.0, 1 - p.sum()) for p in probability]
    offsets = np.cumsum([0, 0, *(len(row[0]) for row in rows)])
    ids, p, counts = (
        np.concatenate([row[part] for row in rows] or [np.empty(0)]) for part in range(3)
    )
    return Scores(
        offsets=offsets.astype(np.int64),
        ids=ids.astype(np.int32),
        logprobs=None if scheme.kind == "sampled" else np.log(p).astype(np.float32),
        counts=counts.astype(np.int32),
        tail=np.array([0, *(row[3] for row in rows)], np.float32),
        dropped=np.array([0, *dropped], np.float32),
        entropy=np.array([0, *(row[4] for row in rows)], np.float32),
    )


def _row(p: NDArray[np.float64], scheme: Scheme, rng: np.random.Generator) -> tuple:
    """Return ids, probabilities, counts, tail and entropy of one position."""
    dropped = max(0.0, 1 - p.sum())
    if scheme.kind == "full":
        return np.arange(len(p)), p, np.zeros(len(p)), dropped, _entropy(p / p.sum())
    if scheme.kind == "sampled":
        ids, counts = np.unique(
            rng.choice(len(p), size=scheme.samples, p=p / p.sum()), return_counts=True
        )
        return ids, p[ids], counts, 1.0, _entropy(p / p.sum())
    order = np.argsort(-p, kind="stable")
    kept, others = order[: scheme.top_k], order[scheme.top_k :]
    mass = p[others].sum()
    if len(others) == 0:
        return kept, p[kept], np.zeros(len(kept)), dropped, _entropy(p / p.sum())
    ids, counts = np.unique(
        rng.choice(others, size=scheme.tail_samples, p=p[others] / mass), return_counts=True
    )
    spread = p.copy()
    spread[others] *= (mass + dropped) / mass
    return (
        np.concatenate([kept, ids]),
        p[np.concatenate([kept, ids]).astype(int)],
        np.concatenate([np.zeros(len(kept)), counts]),
        mass + dropped,
        _entropy(spread),
    )


def _entropy(p: NDArray[np.float64]) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def tiny_description(
    scheme: Scheme,
    values: Values = "float16",
    lengths: Sequence[Sequence[int]] = LENGTHS,
    shards: Sequence[tuple[int, int]] = SHARDS,
    vocabulary: int = VOCABULARY,
) -> Description:
    plans = []
    for number, (first, stop) in enumerate(shards):
        windows = [length for document in lengths[first:stop] for length in document]
        plans.append(
            ShardPlan(
                number=number,
                first_document=first,
                stop_document=stop,
                windows=len(windows),
                tokens=sum(windows),
            )
        )
    return Description(
        teacher=TeacherInfo(
            name="tiny",
            digest="t" * 64,
            engine="torch",
            quantization="none",
            dtype="float32",
            vocab_size=48,
            tokenizer_size=44,
        ),
        tokenizer=TokenizerInfo(digest="v" * 64, size=vocabulary),
        corpus=CorpusInfo(digest="c" * 64, documents=len(lengths)),
        scheme=scheme,
        values=values,
        max_seq_len=max(length for document in lengths for length in document),
        seed=7,
        shards=tuple(plans),
    )


def tiny_windows(
    description: Description, number: int, lengths: Sequence[Sequence[int]] = LENGTHS
) -> list[Window]:
    """Return a shard's windows; the same every time, as from a teacher."""
    plan = description.shards[number]
    size = description.tokenizer.size
    windows = []
    for document in range(plan.first_document, plan.stop_document):
        start = 0
        for length in lengths[document]:
            rng = np.random.default_rng((description.seed, document, start))
            tokens = rng.integers(size, size=length, dtype=np.int32)
            scores = score(draw_logits(rng, length - 1, size), description.scheme, rng)
            windows.append(Window(document, start, tokens, scores))
            start += length
    return windows


def tiny_folder(path: Path, description: Description, write: Sequence[int] | None = None):
    """Return a described folder in which some shards, or all, are written."""
    folder = LogitsFolder(path)
    folder.write_description(description)
    for number in range(len(description.shards)) if write is None else write:
        folder.write_shard(number, tiny_windows(description, number))
    return folder
