"""Experiments on compressed gradients: what top-k keeps, and what error feedback recovers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from trainer.config.codec import CODECS
from trainer.exchange.policies.feedback import ErrorFeedback
from trainer.exchange.protocol.codecs import Codec, Float32, make_codec
from trainer.lab.experiment import Experiment, Formula, Row
from trainer.system.errors import InputError

QUANTIZED = tuple(name for name, kind in CODECS.items() if kind.is_quantized)
_MOMENTS = (1, 3, 10, 30, 100, 300, 1000)
"""Steps at which the error is shown."""


def top_k(seed: int, parameters: int, workers: int, density: float) -> Experiment:
    """Return how much of normally distributed gradients their largest values keep.

    Gradients are those of `numpy.random.seed(seed)` and one `randn` a worker, so that figures can
    be compared with those of other programs. Motley itself has no such codec: docs/decisions.md
    says what it cost a real model.

    Raises:
        InputError: `density` is below 0.000001 or above 0.5.
    """
    if not 1e-6 <= density <= 0.5:
        raise InputError(
            f"--density {density:g}: not a density; it is at least 0.000001 and at most 0.5"
        )
    draw = np.random.RandomState(seed)  # the legacy generator, whose stream is frozen
    gradients = [draw.randn(parameters) for _ in range(workers)]
    kept = max(1, round(density * parameters))
    exact = [_keep_largest(gradient, kept) for gradient in gradients]
    mean = np.mean(gradients, axis=0)
    plain, pairs = 4 * parameters, 8 * kept

    def make_row(what: str, elements: int, nbytes: int, received: Sequence[np.ndarray]) -> Row:
        return {
            "a worker sends": what,
            "elements": elements,
            "fewer elements": f"{100 * (1 - elements / parameters):.1f} %",
            "bytes": nbytes,
            "times fewer bytes": plain / nbytes,
            "cosine": round(_cosine(np.mean(received, axis=0), mean), 4),
        }

    edge = NormalDist().inv_cdf(1 - density / 2)
    energy = 2 * (edge * NormalDist().pdf(edge) + density / 2)
    return Experiment(
        name="topk",
        title=(
            f"top-k: {workers} workers, {parameters:,} parameters, {density:g} of them kept,"
            f" seed {seed}"
        ),
        rows=[
            make_row("all, fp32", parameters, plain, gradients),
            make_row("top-k, fp32 and 32-bit indices", kept, pairs, exact),
        ],
        formulas=[
            Formula("bytes = k (4 + 4)", "a value and its index"),
            Formula(
                "cosine = |C(g)| / |g| for one gradient", "the values kept are those of g itself"
            ),
            Formula(
                f"sqrt(2 (t pdf(t) + density / 2)) = {math.sqrt(energy):.4f} at t = {edge:.3f}",
                "its expectation for normal values: the second moment of both tails",
            ),
        ],
        notes=[
            "cosine: between the average of what arrives and the average of all.",
            f"{100 * (1 - kept / parameters):.1f} % fewer elements are"
            f" {100 * (1 - pairs / plain):.1f} % fewer bytes, since positions travel too.",
        ],
    )


def measure_feedback(seed: int, parameters: int, workers: int, steps: int) -> Experiment:
    """Return how far the sum of what was sent is from the sum of all gradients, step by step.

    Every gradient is the same mean plus fresh noise of the same size, so a direction stays that
    all steps share, as in training.
    """
    rows: list[Row] = []
    shown = [moment for moment in _MOMENTS if moment < steps] + [steps]
    for name in QUANTIZED:
        for with_feedback in (False, True):
            errors = _measure_errors(
                name, seed, parameters, workers, steps, with_feedback=with_feedback
            )
            row: Row = {"codec": name, "error feedback": "yes" if with_feedback else "no"}
            row |= {f"step {moment}": round(errors[moment - 1], 5) for moment in shown}
            rows.append(row)
    return Experiment(
        name="feedback",
        title=(
            f"error feedback: {workers} workers, {parameters:,} parameters, {steps} steps,"
            f" seed {seed}"
        ),
        rows=rows,
        formulas=[
            Formula("send C(e + g), then e = e + g - C(e + g)", "arXiv:1901.09847, algorithm 2"),
            Formula(
                "error = |sum of sent - sum of g| / |sum of g|",
                "both over all workers and all steps so far",
            ),
        ],
        notes=[
            "Without feedback the rounding averages out as 1 / sqrt(steps). With it the error is"
            " the residual, which stays bounded while the sum grows: 1 / steps in the end.",
        ],
    )


def _measure_errors(
    name: str, seed: int, parameters: int, workers: int, steps: int, *, with_feedback: bool
) -> list[float]:
    draw = np.random.RandomState(seed)
    shared = draw.randn(parameters).astype(np.float32)
    codec = make_codec(name)
    senders = [ErrorFeedback(codec, [parameters]) for _ in range(workers)]
    true, sent = np.zeros(parameters), np.zeros(parameters)
    errors: list[float] = []
    for _ in range(steps):
        for sender in senders:
            gradient = shared + draw.randn(parameters).astype(np.float32)
            true += gradient
            if with_feedback:
                used, encoded = sender.encode(0, gradient)
                out = np.empty(parameters, np.float32)
                used.decode(encoded, out)
                sent += out
            else:
                sent += _round_trip(codec, gradient)
        errors.append(float(np.linalg.norm(sent - true) / np.linalg.norm(true)))
    return errors


def _round_trip(codec: Codec, gradient: Float32) -> Float32:
    out = np.empty_like(gradient)
    codec.decode(codec.encode(gradient), out)
    return out


def _keep_largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the values with all but the largest magnitudes zero."""
    out = np.zeros_like(values)
    chosen = np.argsort(-np.abs(values), kind="stable")[:count]
    out[chosen] = values[chosen]
    return out


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))
