"""What a student compares with: sums, exactness, unbiasedness, other temperatures."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.covering import covering
from tests.trainer.tiny_logits import SCHEMES, VOCABULARY, draw_logits, score
from trainer.distill.logits.scores import Scheme
from trainer.distill.logits.targets import make_targets
from trainer.system.errors import InputError

STUDENT = np.arange(0, VOCABULARY, 2, dtype=np.int32)
"""The teacher's ids of a student with half the tokens."""


def dense(soft, vocabulary=VOCABULARY):
    out = np.zeros((len(soft.rest), vocabulary))
    for t in range(len(soft.rest)):
        entries = slice(soft.offsets[t], soft.offsets[t + 1])
        out[t, soft.ids[entries]] = soft.weights[entries]
    return out


def softmax(logits, temperature=1.0):
    p = np.exp(logits / temperature - (logits / temperature).max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def entropy(p):
    return -(p * np.log(np.where(p > 0, p, 1))).sum(axis=1)


def spread(logits, top_k, temperature=1.0):
    """Return what a trimmed student should learn: dropped mass goes to what is not kept."""
    p = softmax(logits)[:, STUDENT]
    for row in p:
        others = np.argsort(-row, kind="stable")[top_k:]
        row[others] *= 1 + (1 - row.sum()) / row[others].sum()
    p = p ** (1 / temperature)
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("divergence", ["forward", "jsd"])
@pytest.mark.parametrize("kind", SCHEMES)
def test_positions_without_scores_have_none_and_change_no_others(kind, divergence):
    scheme = SCHEMES[kind]
    if kind == "sampled" and divergence != "forward":
        return
    rng = np.random.default_rng(3)
    scores = score(draw_logits(rng, 20), scheme, rng)
    stays = rng.random(21) < 0.5
    entries = np.repeat(stays, np.diff(scores.offsets))
    some = replace(
        scores,
        offsets=np.concatenate([[0], np.cumsum(np.where(stays, np.diff(scores.offsets), 0))]),
        ids=scores.ids[entries],
        logprobs=None if scores.logprobs is None else scores.logprobs[entries],
        counts=scores.counts[entries],
        **{name: getattr(scores, name) * stays for name in ("tail", "dropped", "entropy")},
    )
    found, whole = (make_targets(each, scheme, 1.0, divergence) for each in (some, scores))
    np.testing.assert_array_equal(dense(found), dense(whole) * stays[:, None])
    np.testing.assert_array_equal(found.rest, whole.rest * stays)
    np.testing.assert_array_equal(found.entropy, whole.entropy * stays)


@pytest.mark.parametrize("student", [None, STUDENT], ids=["whole", "trimmed"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("kind", "divergence"),
    [(kind, each) for kind in SCHEMES for each in ("forward", "reverse", "jsd")],
)
def test_sums_to_one_or_is_refused(kind, divergence, temperature, student):
    scheme = SCHEMES[kind]
    rng = np.random.default_rng(3)
    scores = score(draw_logits(rng, 50), scheme, rng, student)
    if kind == "sampled" and divergence != "forward":
        with pytest.raises(InputError, match="give no probabilities"):
            make_targets(scores, scheme, temperature, divergence)
        return
    if kind in ("sampled", "kept") and temperature != 1:
        with pytest.raises(InputError, match="cannot be converted"):
            make_targets(scores, scheme, temperature, divergence)
        return
    soft = make_targets(scores, scheme, temperature, divergence)
    sums = dense(soft).sum(axis=1) + soft.rest
    np.testing.assert_allclose(sums, [0] + [1] * 50, atol=1e-6)
    assert soft.entropy[0] == 0
    assert soft.temperature == temperature
    assert (soft.weights.dtype, soft.ids.dtype, soft.offsets.dtype) == ("f4", "i4", "i8")


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize(("stored", "wanted"), [(1, 1), (1, 3), (2, 1)])
def test_full_is_exact_at_any_temperature(stored, wanted, divergence):
    rng = np.random.default_rng(4)
    logits = draw_logits(rng, 20)
    scheme = Scheme(kind="full", temperature=stored)
    soft = make_targets(score(logits, scheme, rng), scheme, wanted, divergence)
    expected = softmax(logits, wanted)
    np.testing.assert_allclose(dense(soft)[1:], expected, atol=1e-6)
    np.testing.assert_allclose(soft.entropy[1:], entropy(expected), atol=1e-5)
    np.testing.assert_array_equal(soft.rest, 0)


@pytest.mark.parametrize("kind", ["topk", "kept"])
@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_kept_tokens_are_exact(kind, divergence):
    rng = np.random.default_rng(5)
    logits, scheme = draw_logits(rng, 20), SCHEMES[kind]
    soft = make_targets(score(logits, scheme, rng, STUDENT), scheme, 1, divergence)
    expected = softmax(logits)[:, STUDENT]
    kept = np.argsort(-expected, axis=1)[:, : scheme.top_k]
    ours = np.take_along_axis(dense(soft, len(STUDENT))[1:], kept, axis=1)
    known = np.take_along_axis(expected, kept, axis=1)
    np.testing.assert_allclose(ours, known, atol=1e-6)
    if kind == "kept" or divergence != "forward":  # everything else is one bucket
        np.testing.assert_allclose(soft.rest[1:], 1 - known.sum(axis=1), atol=1e-6)
        buckets = np.concatenate([known, 1 - known.sum(axis=1, keepdims=True)], axis=1)
        np.testing.assert_allclose(soft.entropy[1:], entropy(buckets), atol=1e-5)


@pytest.mark.parametrize("tail_samples", [0, 4])
@pytest.mark.parametrize("student", [None, STUDENT], ids=["whole", "trimmed"])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_a_vocabulary_that_is_kept_whole_has_no_rest(tail_samples, student, divergence):
    rng = np.random.default_rng(6)
    logits = draw_logits(rng, 20)
    size = VOCABULARY if student is None else len(student)
    scheme = Scheme(kind="topk", top_k=size, tail_samples=tail_samples)
    soft = make_targets(score(logits, scheme, rng, student), scheme, 1, divergence)
    expected = softmax(logits) if student is None else softmax(logits[:, student])
    np.testing.assert_allclose(dense(soft, size)[1:], expected, atol=1e-6)
    np.testing.assert_allclose(soft.entropy[1:], entropy(expected), atol=1e-5)
    np.testing.assert_array_equal(soft.rest, 0)


@pytest.mark.parametrize(("kind", "seed"), covering(product(["topk", "sampled"], [11, 12])))
def test_draws_are_unbiased(kind, seed):
    """The mean over many positions that draw is the distribution itself, and the KL the true one.

    With 3000 repetitions a mean lies 6 standard errors away once in 5e8 figures; 120 are checked.
    """
    rng = np.random.default_rng(seed)
    logits, scheme, repetitions = draw_logits(rng, 6), SCHEMES[kind], 3000
    student = softmax(draw_logits(rng, 6))[:, : len(STUDENT)]
    student /= student.sum(axis=1, keepdims=True)
    expected = spread(logits, scheme.top_k if kind == "topk" else 0)
    divergence = (expected * np.log(expected / student)).sum(axis=1)
    drawn = score(np.tile(logits, (repetitions, 1)), scheme, rng, STUDENT)
    soft = make_targets(drawn, scheme, 1, "forward")
    weights = dense(soft, len(STUDENT))[1:].reshape(repetitions, *expected.shape)
    entropies = soft.entropy[1:].reshape(repetitions, len(expected))
    estimates = -(weights * np.log(student)).sum(axis=2) - entropies
    for samples, truth in ((weights, expected), (estimates, divergence)):
        # An entry that is hardly ever drawn shows no variance: what it should have counts as well.
        error = np.maximum(samples.std(axis=0), np.sqrt(np.abs(truth) / 3)) / repetitions**0.5
        assert (np.abs(samples.mean(axis=0) - truth) < 6 * error + 1e-6).all(), f"seed {seed}"


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_tail_at_another_temperature_is_consistent(temperature, divergence):
    rng = np.random.default_rng(13)
    logits = draw_logits(rng, 10)
    scheme = Scheme(kind="topk", top_k=6, tail_samples=300_000)
    soft = make_targets(score(logits, scheme, rng, STUDENT), scheme, temperature, divergence)
    expected = spread(logits, 6, temperature)
    ours = dense(soft, len(STUDENT))[1:]
    if divergence == "forward":
        np.testing.assert_allclose(ours, expected, atol=5e-3)
        np.testing.assert_allclose(soft.entropy[1:], entropy(expected), atol=2e-2)
    else:
        kept = ours > 0
        np.testing.assert_allclose(ours[kept], expected[kept], atol=5e-3)
        np.testing.assert_allclose(soft.rest[1:], np.where(kept, 0, expected).sum(1), atol=5e-3)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_full_has_tokens_without_probability(temperature):
    """As float16 stores the logarithm of what is next to nothing; and a window of one token."""
    logits = np.zeros((1, VOCABULARY))
    scheme, rng = SCHEMES["full"], np.random.default_rng(0)
    scores = score(logits, scheme, rng)
    logprobs = np.where(np.arange(VOCABULARY) == 3, 0, -np.inf)
    scores = replace(scores, logprobs=logprobs.astype(np.float32))
    soft = make_targets(scores, scheme, temperature, "forward")
    np.testing.assert_array_equal(soft.weights, np.arange(VOCABULARY) == 3)
    np.testing.assert_array_equal(soft.entropy, 0)
    alone = make_targets(score(logits[:0], scheme, rng), scheme, temperature, "forward")
    assert (len(alone.weights), alone.entropy.tolist()) == (0, [0])


def test_no_divergence_is_negative():
    """KL of 10,000 distributions to close ones, in float32: at least minus its rounding."""
    rng = np.random.default_rng(15)
    scheme = SCHEMES["full"]
    logits = draw_logits(rng, 10_000)
    soft = make_targets(score(logits, scheme, rng), scheme, 1, "forward")
    near = softmax(logits + rng.normal(scale=1e-3, size=logits.shape))
    p = dense(soft)[1:]
    divergence = -(p * np.log(near)).sum(axis=1) - soft.entropy[1:]
    assert divergence.min() >= -1e-6
