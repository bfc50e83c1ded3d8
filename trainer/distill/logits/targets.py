"""Convert a teacher's scores to the targets of a student's loss.

A teacher's mass outside the student's vocabulary is spread over the tokens not kept exactly, in
proportion, so every position's weights (and the rest) sum to 1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from trainer.config.distillation import Divergence
from trainer.data.soft_targets import SoftTargets
from trainer.distill.logits.scores import Scheme, Scores
from trainer.system.errors import InputError

_NO_TAIL = 2.0**-10
"""Share of the tail inside the student's vocabulary below which no token can receive it;
twice the rounding of the stored values."""
_NEVER = -200.0
"""A logarithm whose fp32 power is 0: a probability of 0 must not give 0 x Inf."""


def make_targets(
    scores: Scores, scheme: Scheme, temperature: float, divergence: Divergence
) -> SoftTargets:
    """Return the targets of a student's loss, at its temperature.

    `forward` uses everything that is kept: draws represent the tail in proportion to their counts
    (unbiased, arXiv:2503.16870). `reverse` and `jsd` need probabilities, not estimates: of `topk`
    they use the kept tokens, and all others as one.

    Raises:
        InputError: the scheme lacks what the temperature or divergence needs.
    """
    check_targets(scheme, temperature, divergence)
    exponent = scheme.temperature / temperature
    if scheme.kind == "sampled":
        return _sample_targets(scores, temperature)
    if scheme.kind == "full":
        return _make_full_targets(scores, exponent, temperature)
    if scheme.tail_samples and divergence == "forward":
        return _draw_tail(scores, exponent, temperature)
    return _bucket_tail(scores, scheme, exponent, temperature)


def check_targets(
    scheme: Scheme,
    temperature: float,
    divergence: Divergence,
    choices: Collection[Divergence] = get_args(Divergence),
) -> None:
    """Check that `make_targets` can be computed, before anything is read.

    Args:
        choices: the divergences that an error may advise.

    Raises:
        InputError: names what the logits lack.
    """
    if scheme.kind == "sampled" and divergence != "forward":
        instead = "forward, or " if "forward" in choices else ""
        raise InputError(
            f"divergence {divergence}: draws (`sampled`) give no probabilities; use {instead}logits"
            " of `topk` or `full`"
        )
    bare = has_bare_rest(scheme)
    if temperature != scheme.temperature and (scheme.kind == "sampled" or bare):
        raise InputError(
            f"temperature {temperature:g}: logits of temperature {scheme.temperature:g} cannot be "
            f"converted when {'the tail is one number' if bare else 'only draws are kept'}; "
            f"use temperature {scheme.temperature:g}, or score again"
        )


def has_bare_rest(scheme: Scheme) -> bool:
    """Return whether everything not kept is stored as one number."""
    return scheme.kind == "topk" and scheme.tail_samples == 0


def _sample_targets(scores: Scores, temperature: float) -> SoftTargets:
    at = _entry_positions(scores)
    weights = scores.counts / _sum_by_position(scores.counts, at, scores)[at]
    return _make_targets(scores.offsets, scores.ids, weights, None, scores.entropy, temperature)


def _make_full_targets(scores: Scores, exponent: float, temperature: float) -> SoftTargets:
    """Return all tokens: so many that it costs time, hence in fp32 and mostly in place."""
    assert scores.logprobs is not None
    is_scored = np.diff(scores.offsets) > 0
    rows = int(is_scored.sum())
    log_w = scores.logprobs.reshape(rows, len(scores.ids) // max(1, rows)) * exponent
    log_w -= log_w.max(1, initial=-np.inf, keepdims=True)
    np.maximum(log_w, _NEVER, out=log_w)
    weights = np.exp(log_w)
    total = weights.sum(1, keepdims=True)
    weights /= total
    log_w *= weights
    entropy = np.zeros(len(is_scored))
    entropy[is_scored] = np.log(total[:, 0]) - log_w.sum(1)
    return _make_targets(
        scores.offsets, scores.ids, weights.reshape(-1), None, entropy, temperature
    )


def _draw_tail(scores: Scores, exponent: float, temperature: float) -> SoftTargets:
    """Return the kept tokens, and draws in place of the tail."""
    weights, entropy = _kept_and_drawn(scores, exponent, has_tail=_draw_weights(scores) > 0)
    if exponent == 1:  # stored exactly where the tail was drawn
        entropy = np.where(_draw_weights(scores) > 0, scores.entropy, entropy)
    return _make_targets(scores.offsets, scores.ids, weights, None, entropy, temperature)


def _bucket_tail(
    scores: Scores, scheme: Scheme, exponent: float, temperature: float
) -> SoftTargets:
    """Return the kept tokens, and the rest as one."""
    at, kept = _entry_positions(scores), scores.counts == 0
    if scheme.tail_samples:
        weights, _ = _kept_and_drawn(scores, exponent, has_tail=_draw_weights(scores) > 0)
        rest = _sum_by_position(np.where(kept, 0, weights), at, scores)
    else:
        has_tail = _mass_inside(scores) > _NO_TAIL * scores.tail
        weights, _ = _kept_and_drawn(scores, exponent, has_tail=has_tail)
        rest = np.where(has_tail, scores.tail, 0)
    entropy = _sum_by_position(
        np.where(kept, _entropy_terms(weights), 0), at, scores
    ) + _entropy_terms(rest)
    counts = np.bincount(at[kept], minlength=len(rest))
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return _make_targets(offsets, scores.ids[kept], weights[kept], rest, entropy, temperature)


def _kept_and_drawn(
    scores: Scores, exponent: float, has_tail: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the weights of all entries at another temperature, and the entropy.

    With s the stored distribution and r the exponent, a kept token has s^r, and the draws from the
    tail have importance weights: the tail is the mean of s^(r - 1) over them, times its mass. Both
    together sum to 1 if r is not 1, and to 1 less an undrawn tail if it is.
    """
    assert scores.logprobs is not None
    at, drawn = _entry_positions(scores), scores.counts > 0
    tail = np.where(has_tail, scores.tail, 0).astype(np.float64)
    log_s = scores.logprobs.astype(np.float64)
    kept_mass = _sum_by_position(np.where(drawn, 0, np.exp(log_s)), at, scores)
    spread = np.maximum(_mass_inside(scores), _NO_TAIL * scores.tail)
    with np.errstate(divide="ignore", invalid="ignore"):  # positions without entries, or a tail
        log_s += np.where(drawn, np.log(tail / spread)[at], np.log((1 - tail) / kept_mass)[at])
        share = (tail / _draw_weights(scores))[at] * scores.counts
    weights = np.where(drawn, share * np.exp((exponent - 1) * log_s), np.exp(exponent * log_s))
    total = _sum_by_position(weights, at, scores)
    if exponent != 1:
        weights /= total[at]
    entropy = np.log(np.where(total > 0, total, 1)) - exponent * _sum_by_position(
        weights * log_s, at, scores
    )
    return weights, entropy


def _entry_positions(scores: Scores) -> NDArray[np.int64]:
    """Return the position of every entry."""
    return np.repeat(np.arange(len(scores.tail)), np.diff(scores.offsets))


def _sum_by_position(values: NDArray, at: NDArray[np.int64], scores: Scores) -> NDArray[np.float64]:
    """Return the sum of every position's entries."""
    return np.bincount(at, values, len(scores.tail)).astype(np.float64, copy=False)


def _draw_weights(scores: Scores) -> NDArray[np.float64]:
    return _sum_by_position(scores.counts, _entry_positions(scores), scores)


def _mass_inside(scores: Scores) -> NDArray[np.float64]:
    """Return the tail's mass inside the student's vocabulary."""
    return np.maximum(scores.tail.astype(np.float64) - scores.dropped, 0)


def _entropy_terms(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -w ln w."""
    return -weights * np.log(np.where(weights > 0, weights, 1))


def _make_targets(
    offsets: NDArray[np.int64],
    ids: NDArray[np.int32],
    weights: NDArray[np.floating],
    rest: NDArray[np.float64] | None,
    entropy: NDArray,
    temperature: float,
) -> SoftTargets:
    return SoftTargets(
        offsets=offsets,
        ids=ids,
        weights=weights.astype(np.float32, copy=False),
        rest=np.zeros(len(entropy), np.float32) if rest is None else rest.astype(np.float32),
        entropy=entropy.astype(np.float32),
        temperature=temperature,
    )
