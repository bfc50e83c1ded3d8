"""Experiments on compressed gradients: what top-k keeps, and what error feedback recovers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from trainer.config.codec import NAMES, read_codec
from trainer.exchange.protocol.codecs import Codec, Float32
from trainer.exchange.protocol.compression.choice import codecs_for
from trainer.exchange.protocol.compression.feedback import ErrorFeedback
from trainer.lab.experiment import Experiment, Formula, Row
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.system.errors import InputError

FEEDBACK_CODECS = tuple(
    name for name in NAMES if (of := read_codec(name)).element_bytes and of.kind.needs_feedback
)
_MOMENTS = (1, 3, 10, 30, 100, 300, 1000)
"""Steps at which the error is shown."""


def top_k(seed: int, parameters: int, workers: int, density: float) -> Experiment:
    """Return how much of normally distributed gradients their largest values keep.

    Gradients are those of `numpy.random.seed(seed)` and one `randn` a worker, so that figures can
    be compared with those of other programs.

    Raises:
        InputError: `density` is no density of the codec.
    """
    draw = np.random.RandomState(seed)  # the legacy generator, whose stream is frozen
    gradients = [draw.randn(parameters) for _ in range(workers)]
    codec = _codec(f"topk:{density:.6f}", parameters)
    density = round(density, 6)
    kept = max(1, round(density * parameters))
    exact = [_largest(gradient, kept) for gradient in gradients]
    decoded = [_through(codec, gradient.astype(np.float32)) for gradient in gradients]
    mean = np.mean(gradients, axis=0)
    plain, pairs, ours = 4 * parameters, 8 * kept, codec.nbytes(parameters)

    def row(what: str, elements: int, nbytes: int, received: Sequence[np.ndarray]) -> Row:
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
            row("all, fp32", parameters, plain, gradients),
            row("top-k, fp32 and 32-bit indices", kept, pairs, exact),
            row(f"Motley's {codec.name}", kept, ours, decoded),
        ],
        formulas=[
            Formula("bytes = k (4 + 4)", "a value and its index"),
            Formula(
                "bytes = 2 k + min(n / 8, 2 k + 4 ceil(n / 65536))",
                "trainer/exchange/protocol/compression/topk.py",
            ),
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


def feedback(seed: int, parameters: int, workers: int, steps: int) -> Experiment:
    """Return how far the sum of what was sent is from the sum of all gradients, step by step.

    Every gradient is the same mean plus fresh noise of the same size, so a direction stays that
    all steps share, as in training.
    """
    rows: list[Row] = []
    shown = [moment for moment in _MOMENTS if moment < steps] + [steps]
    for name in FEEDBACK_CODECS:
        for with_feedback in (False, True):
            errors = _errors(name, seed, parameters, workers, steps, with_feedback=with_feedback)
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
            "Without feedback the rounding of int8 and int4 averages out as 1 / sqrt(steps), but"
            " what top-k drops at every step never arrives. With it the error is what is still"
            " owed, which stays bounded while the sum grows: 1 / steps in the end.",
        ],
    )


def _errors(
    name: str, seed: int, parameters: int, workers: int, steps: int, *, with_feedback: bool
) -> list[float]:
    draw = np.random.RandomState(seed)
    shared = draw.randn(parameters).astype(np.float32)
    codec = _codec(name, parameters)
    senders = [ErrorFeedback([codec], [parameters]) for _ in range(workers)]
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
                sent += _through(codec, gradient)
        errors.append(float(np.linalg.norm(sent - true) / np.linalg.norm(true)))
    return errors


def _codec(name: str, parameters: int) -> Codec:
    """Return a codec of one tensor, a vector."""
    slot = TensorSlot("parameters", (parameters,), 0)
    block = Block(0, "layers.0", 0, parameters, (slot,))
    try:
        (codec,) = codecs_for(name, GradientLayout((block,), num_layers=1))
    except InputError:
        raise InputError(
            f"--density {float(name.removeprefix('topk:')):g}: not a density; it is at least"
            " 0.000001 and at most 0.5"
        ) from None
    return codec


def _through(codec: Codec, gradient: Float32) -> Float32:
    out = np.empty_like(gradient)
    codec.decode(codec.encode(0, gradient), out)
    return out


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the values with all but the largest magnitudes zero."""
    out = np.zeros_like(values)
    chosen = np.argsort(-np.abs(values), kind="stable")[:count]
    out[chosen] = values[chosen]
    return out


def _cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / (np.linalg.norm(first) * np.linalg.norm(second)))
