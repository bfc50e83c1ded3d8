"""Distillation: its kernel and whole models against torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.trainer.replica import driving
from tests.trainer.replica.driving import gradient, relative, taught
from tests.trainer.replica.wgpu.kernels.test_cross_entropy import cross_entropy
from tests.trainer.replica.wgpu.on_device import agree, draw, run
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels import cross_entropy as kernels
from trainer.replica.wgpu.kernels.distillation import TeacherPredictions, distillation_gradient
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny
    from trainer.replica.base import StepResult

SHARES = np.array([0.3, 2.8], np.float32)


def record(
    graph: Graph,
    labels: Array,
    counts: Array,
    classes: Array,
    weights: Array,
    shares: Array,
    ce: Array,
    taught: Array,
    hard: Array,
    soft: Array,
    *parts: Array,
    temperature: float,
) -> None:
    """Record both losses and the gradient; parts are windows of the logits."""
    widths = [part.shape[1] for part in parts]
    firsts = list(itertools.accumulate(widths[:-1], initial=0))
    teacher = TeacherPredictions(classes, weights, shares, temperature)
    tables = ((ce, hard, labels, counts, 1.0), (taught, soft, classes, weights, temperature))
    for total, state, names, masses, at in tables:
        kernels.cross_entropy_start(graph, state)
        for part, first in zip(parts, firsts, strict=True):
            kernels.cross_entropy_window(
                graph, part, state, names, masses, first=first, temperature=at
            )
        kernels.cross_entropy_loss(graph, state, masses, total)
    for part, first in zip(parts, firsts, strict=True):
        distillation_gradient(graph, part, hard, soft, labels, counts, teacher, first=first)


@pytest.mark.parametrize("widths", [[70], [64, 6], [1, 129, 3]])
@pytest.mark.parametrize("entries", [1, 8])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_gradient_is_torchs(
    device: Device, widths: list[int], entries: int, temperature: float
) -> None:
    rows, count = 67, sum(widths)
    rng = np.random.default_rng(entries)
    logits = 5 * draw(rows, count)
    labels = rng.integers(0, count, (rows, 1))
    counts = np.ones((rows, 1), np.float32)
    classes = np.stack([rng.permutation(count)[:entries] for _ in range(rows)])
    classes[:9, 0] = labels[:9, 0]  # a teacher that names the label, in a repeat of no weight, too
    weights = rng.dirichlet(np.ones(entries), rows).astype(np.float32)
    if entries > 1:
        weights[:9][classes[:9] == labels[:9]] = 0
        weights[:9, 0] = 0.5
    weights[20] = 0  # no teacher here
    counts[21], weights[21] = 0, 0  # nothing to learn here

    states = [np.full((rows, 4), np.nan) for _ in range(2)]
    parts = np.split(logits, np.cumsum(widths)[:-1], axis=1)
    given = [labels, counts, classes, weights, SHARES]
    ce, taught, _, _, *gradients = run(
        device, record, given, [np.zeros(1), np.zeros(1), *states, *parts], temperature=temperature
    )
    gradient = np.concatenate(gradients, 1)
    their_ce, of_ce = cross_entropy(logits, labels, counts)
    theirs, of_taught = cross_entropy(logits, classes, weights, temperature)
    assert (ce[0], taught[0]) == pytest.approx((float(their_ce), float(theirs)), rel=1e-5)
    agree(gradient, SHARES[0] * of_ce + SHARES[1] * of_taught)
    assert not gradient[21].any()


def settings(temperature: float, **more: Any) -> dict[str, Any]:
    return {
        "task": "causal-lm",
        "distillation__temperature": temperature,
        "distillation__alpha": 0.7,
        **more,
    }


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize(("method", "quantization"), driving.METHODS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_loss_and_gradients_of_a_model_are_torchs(
    device: Device, tiny: Tiny, model_type: str, method: str, quantization: str, temperature: float
) -> None:
    folder = tiny.model(model_type)
    given = settings(temperature, method=method, model__quantization=quantization)
    torch_replica, _ = tiny.start(folder, **given)
    replica, _ = tiny.wgpu(device, folder, **given)
    batch = taught(tiny.batch(7, "causal-lm"), temperature, rest=False)
    tolerance = 1e-4 if quantization == "nf4" else 1e-5
    for alpha in (None, 0.25, 1.0, 0.0):
        theirs, expected, _ = gradient(torch_replica, batch, alpha=alpha)
        mine, result, _ = gradient(replica, batch, alpha=alpha)
        assert relative(mine, theirs) < tolerance, alpha
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=tolerance)
        if alpha == 0:  # as without a teacher
            assert result.ce_sum is expected.ce_sum is None
        else:
            sums = expected.ce_sum, expected.kl_sum
            assert (result.ce_sum, result.kl_sum) == pytest.approx(sums, rel=tolerance)
    again = gradient(replica, batch, alpha=0.25)[0]
    assert np.array_equal(again, gradient(replica, batch, alpha=0.25)[0])
    assert not np.array_equal(again, mine)
    scored, scored_by_torch = replica.evaluate(batch), torch_replica.evaluate(batch)
    assert scored.loss_sum == pytest.approx(scored_by_torch.loss_sum, rel=tolerance)


def test_the_split_into_micro_batches_does_not_matter(device: Device, tiny: Tiny) -> None:
    """Tables have another width in each micro-batch, and the vocabulary comes in windows."""
    batch = taught(tiny.batch(8, "causal-lm"), 2.0, rest=False)
    narrow = Device(device.adapter, binding_limit=32 << 10)
    found: list[tuple[np.ndarray, StepResult]] = []
    for where, limit in (
        (device, MicroBatchLimit(1, 1000)),
        (device, MicroBatchLimit(8, 1000)),
        (narrow, None),
    ):
        replica, _ = tiny.wgpu(where, **settings(2.0, data__max_seq_len=48))
        replica.limit = limit or replica.limit
        found.append(gradient(replica, batch)[:2])
    for flat, result in found:
        assert relative(flat, found[0][0]) < 1e-6
        assert result.kl_sum == pytest.approx(found[0][1].kl_sum, rel=1e-6)


@pytest.mark.parametrize("divergence", ["reverse", "jsd"])
def test_other_divergences_are_refused_before_start(
    device: Device, tiny: Tiny, divergence: str
) -> None:
    with pytest.raises(InputError, match=rf"{divergence} is not computed by the wgpu engine"):
        tiny.wgpu(device, **settings(1.0, distillation__divergence=divergence))


def test_a_rest_that_nobody_sampled_is_refused(device: Device, tiny: Tiny) -> None:
    replica, _ = tiny.wgpu(device, **settings(1.0))
    batch = taught(tiny.batch(3, "causal-lm"), 1.0, rest=False)
    assert batch[1].soft is not None
    batch[1].soft.rest[-1] = 0.125
    with pytest.raises(InputError, match="logits whose tail is one number"):
        gradient(replica, batch)
