"""The scorer against a plain NumPy twin in fp64, and what its draws are worth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainer.distill.logits.scores import Scheme, Scores
from trainer.distill.teacher.logits_compression import BLOCK, Scorer, draw_uniforms
from trainer.distill.teacher.rows import Rows

VOCAB, POSITIONS = 700, 40
DRAWS = np.random.default_rng(5)
TOPK = Scheme(kind="topk", top_k=6, tail_samples=5, temperature=1.5)
SAMPLED = Scheme(kind="sampled", samples=20)
FULL = Scheme(kind="full", temperature=2.0)
IN_ORDER = np.arange(690, dtype=np.int32)
"""A tokenizer shorter than the teacher's padded vocabulary."""
TRIMMED = np.sort(DRAWS.permutation(690)[:300]).astype(np.int32)


def random_logits(count: int = POSITIONS, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(1).standard_normal((count, vocab)) * 3).astype(np.float32)


def twin(
    logits: NDArray[np.float32],
    points: NDArray[np.float64],
    teacher_ids: NDArray[np.int32],
    scheme: Scheme,
) -> Scores:
    """Score positions one by one, with sorts and sums over the whole vocabulary."""
    size = len(teacher_ids)
    ids, logprobs, counts, offsets = [], [], [], [0, 0]
    tail, dropped, entropy = [0.0], [0.0], [0.0]
    for row, drawn_at in zip(logits.astype(np.float64), points, strict=True):
        scaled = row / scheme.temperature
        log_p = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        p, log_p = np.exp(log_p[teacher_ids]), log_p[teacher_ids]
        kept = np.argsort(-log_p, kind="stable")[: scheme.top_k] if scheme.kind == "topk" else []
        if scheme.kind == "full":
            kept = np.arange(size)
        below = p.copy()
        below[kept] = 0
        # Then the blocks are the teacher's.
        in_order = np.array_equal(teacher_ids, np.arange(size))
        drawn = draw(np.pad(below, (0, len(row) - size)) if in_order else below, drawn_at)
        unique, times = np.unique(drawn, return_counts=True)
        ids += [*kept, *unique]
        logprobs += [*log_p[kept], *log_p[unique]]
        counts += [*[0] * len(kept), *times]
        offsets.append(len(ids))
        lost = 1 - p.sum()
        dropped.append(lost)
        tail.append(below.sum() + lost)
        q = p / p.sum()
        if scheme.kind == "topk" and below.sum() > 0:
            q = np.where(below > 0, below * (below.sum() + lost) / below.sum(), p)
        entropy.append(-(q * np.log(np.maximum(q, 1e-300))).sum())
    return Scores(
        np.array(offsets),
        np.array(ids, np.int32),
        None if scheme.kind == "sampled" else np.array(logprobs, np.float32),
        np.array(counts, np.int32),
        np.array(tail, np.float32),
        np.array(dropped, np.float32),
        np.array(entropy, np.float32),
    )


def draw(mass: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return tokens by inverse CDF in the scorer's order: one strided block after the other."""
    width = -(-len(mass) // BLOCK)
    order = np.arange(BLOCK * width).reshape(BLOCK, width).T.ravel()
    sums = np.cumsum(np.pad(mass, (0, BLOCK * width - len(mass)))[order])
    if sums[-1] == 0:
        return np.zeros(0, np.int64)
    return order[np.searchsorted(sums, points * sums[-1], side="right")]


def score(
    scheme: Scheme, teacher_ids: NDArray[np.int32], logits: NDArray[np.float32], **window: Any
) -> Scores:
    return score_rows(scheme, teacher_ids, logits, **window).to_scores(
        with_logprobs=scheme.kind != "sampled"
    )


def score_rows(
    scheme: Scheme,
    teacher_ids: NDArray[np.int32],
    logits: NDArray[np.float32],
    document: int = 3,
    start: int = 64,
) -> Rows:
    scorer = Scorer(scheme, teacher_ids, logits.shape[1])
    points = draw_uniforms(7, document, start, len(logits), scorer.draws)
    return scorer.score_rows(torch.from_numpy(logits), points)


@pytest.mark.parametrize("teacher_ids", [IN_ORDER, TRIMMED], ids=["in order", "trimmed"])
@pytest.mark.parametrize("scheme", [TOPK, SAMPLED, FULL], ids=["topk", "sampled", "full"])
def test_scores_as_the_twin_does(scheme: Scheme, teacher_ids: NDArray[np.int32]) -> None:
    logits = random_logits()
    draws = Scorer(scheme, teacher_ids, VOCAB).draws
    points = draw_uniforms(7, 3, 64, POSITIONS, draws)
    expected = twin(logits, points, teacher_ids, scheme)
    found = score(scheme, teacher_ids, logits)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.counts, expected.counts)
    for name in ("logprobs", "tail", "dropped", "entropy"):
        there, here = getattr(expected, name), getattr(found, name)
        assert (there is None) == (here is None)
        if there is not None:
            np.testing.assert_allclose(here, there, rtol=2e-5, atol=2e-6, err_msg=name)


def test_a_vocabulary_of_the_size_of_a_real_one() -> None:
    ids = np.arange(151_669, dtype=np.int32)
    scheme = Scheme(kind="topk", top_k=64, tail_samples=8)
    logits = random_logits(3, 151_936)
    expected = twin(logits, draw_uniforms(7, 3, 64, 3, 8), ids, scheme)
    found = score(scheme, ids, logits)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.entropy, expected.entropy, rtol=1e-5)


def test_nothing_is_dropped_when_each_token_is_the_students() -> None:
    found = score(TOPK, np.arange(VOCAB, dtype=np.int32), random_logits())
    assert not found.dropped.any()


def test_rows_that_fill_several_buffers_are_the_same_as_one_by_one() -> None:
    logits = random_logits(200)
    points = draw_uniforms(7, 3, 64, 200, TOPK.tail_samples)
    few = Scorer(TOPK, TRIMMED, VOCAB, rows=3).score_rows(torch.from_numpy(logits), points)
    many = Scorer(TOPK, TRIMMED, VOCAB, rows=999).score_rows(torch.from_numpy(logits), points)
    for name in Rows.__slots__:
        np.testing.assert_allclose(getattr(few, name), getattr(many, name), rtol=1e-5, atol=1e-6)


def test_a_buffer_that_was_used_before_leaves_no_trace() -> None:
    scorer = Scorer(TOPK, TRIMMED, VOCAB)
    points = draw_uniforms(7, 3, 64, POSITIONS, scorer.draws)
    logits = torch.from_numpy(random_logits())
    first = scorer.score_rows(logits, points)
    scorer.score_rows(logits.flip(1) * 5, points)
    again = scorer.score_rows(logits, points)
    for name in Rows.__slots__:
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_scored_in_fp32(dtype: torch.dtype) -> None:
    logits = torch.from_numpy(random_logits()).to(dtype)
    points = draw_uniforms(7, 3, 64, POSITIONS, TOPK.tail_samples)
    half = Scorer(TOPK, TRIMMED, VOCAB).score_rows(logits, points)
    single = Scorer(TOPK, TRIMMED, VOCAB).score_rows(logits.float(), points)
    for name in Rows.__slots__:
        np.testing.assert_array_equal(getattr(half, name), getattr(single, name))


def test_tokens_with_a_logit_of_minus_infinity_are_impossible_and_harmless() -> None:
    logits = random_logits()
    logits[:, 10:200] = -np.inf
    for scheme in (TOPK, SAMPLED):
        rows = score_rows(scheme, IN_ORDER, logits)
        assert rows.finite
        ids = rows.to_scores(with_logprobs=False).ids
        assert not np.any((ids >= 10) & (ids < 200))


@pytest.mark.parametrize("scheme", [TOPK, SAMPLED, FULL], ids=lambda scheme: scheme.kind)
def test_fewer_possible_tokens_than_are_kept(scheme: Scheme) -> None:
    logits = np.full((POSITIONS, VOCAB), -np.inf, np.float32)
    logits[:, [3, 5]] = 1.0
    scores = score_rows(scheme, IN_ORDER, logits).to_scores(with_logprobs=True)
    assert scores.logprobs is not None
    assert np.isfinite(scores.logprobs).all()
    assert scores.ids.max() < len(IN_ORDER)
    possible = np.isin(scores.ids, [3, 5])
    assert possible.any()
    np.testing.assert_allclose(scores.logprobs[possible], np.log(0.5), atol=1e-6)
    assert np.exp(scores.logprobs[~possible]).sum() == 0
    np.testing.assert_allclose(scores.entropy[1:], np.log(2), atol=1e-6)


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_logit_that_is_no_number_shows(spoilt: float) -> None:
    logits = random_logits()
    logits[3, 5] = spoilt
    for scheme in (TOPK, SAMPLED, FULL):
        assert not score_rows(scheme, IN_ORDER, logits).finite


def test_a_certain_teacher_leaves_nothing_to_draw() -> None:
    logits = np.full((2, VOCAB), -200.0, np.float32)
    logits[:, :6] = [4, 3, 2, 1, 0, -1]
    found = score(TOPK, IN_ORDER, logits)
    np.testing.assert_array_equal(found.ids.reshape(2, 6), [[0, 1, 2, 3, 4, 5]] * 2)
    assert not found.counts.any()
    p = np.exp(np.array([4, 3, 2, 1, 0, -1]) / 1.5)
    p /= p.sum()
    np.testing.assert_allclose(found.entropy[1:], -(p * np.log(p)).sum(), rtol=1e-5)
    np.testing.assert_allclose(found.tail, 0, atol=1e-6)


def test_more_kept_than_there_are_tokens_keeps_all() -> None:
    found = score(Scheme(kind="topk", top_k=500), TRIMMED, random_logits())
    assert np.all(np.diff(found.offsets)[1:] == len(TRIMMED))
    np.testing.assert_allclose(found.tail, found.dropped, atol=1e-6)


def test_a_windows_draws_are_repeatable_and_differ_between_windows() -> None:
    logits = random_logits()
    first, again = (score(SAMPLED, TRIMMED, logits) for _ in range(2))
    np.testing.assert_array_equal(first.ids, again.ids)
    for window in ({"document": 4}, {"start": 0}):
        other = score(SAMPLED, TRIMMED, logits, **window)
        assert not np.array_equal(first.ids, other.ids)


def test_a_windows_draws_do_not_overlap_those_of_the_next_position_or_document() -> None:
    first = draw_uniforms(0, 0, 0, 1000, 8)
    assert first.min() >= 0
    assert first.max() < 1
    assert len(np.unique(first)) == first.size
    for other in (
        draw_uniforms(0, 0, 1, 1000, 8),
        draw_uniforms(0, 1, 0, 1000, 8),
        draw_uniforms(1, 0, 0, 9, 8),
    ):
        assert not np.isin(other, first).any()
    np.testing.assert_array_equal(first[:10], draw_uniforms(0, 0, 0, 10, 8))


@pytest.mark.parametrize("scheme", [Scheme(kind="sampled", samples=50), TOPK], ids=lambda s: s.kind)
def test_the_draws_follow_the_distribution(scheme: Scheme) -> None:
    """Pearson's statistic of 4000 equal positions: its mean is df, its variance 2 df."""
    logits = np.repeat(random_logits(1), 4000, axis=0)
    rows = score_rows(scheme, TRIMMED, logits)
    p = np.exp(logits[0, TRIMMED].astype(np.float64) / scheme.temperature)
    p[rows.kept[0]] = 0
    p /= p.sum()
    counts = np.bincount(rows.drawn.ravel(), minlength=len(p))
    assert not counts[p == 0].any()
    often = p * rows.drawn.size > 5
    expected = p[often] * rows.drawn.size
    statistic = ((counts[often] - expected) ** 2 / expected).sum()
    freedom = often.sum() - 1
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom)
