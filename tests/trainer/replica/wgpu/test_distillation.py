"""Distillation: its kernel against its twin and torch, and whole models against torch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.trainer.replica import driving
from tests.trainer.replica.driving import gradient, relative
from tests.trainer.replica.wgpu.on_device import agree, draw, leaf, run
from tests.trainer.replica.wgpu.test_cross_entropy import cross_entropy
from tests.trainer.replica.wgpu.test_replica import start
from trainer.data.soft_targets import SoftTargets
from trainer.model.layout import build_layout
from trainer.replica.microbatch import Limit
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels import cross_entropy as kernels
from trainer.replica.wgpu.kernels.distillation import TeacherPredictions, distillation_gradient
from trainer.replica.wgpu.replica import WgpuReplica
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.replica.conftest import MakeBatch
    from trainer.data.tokens import Encoded
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
    twin_ce, of_ce = cross_entropy(logits, labels, counts, 1.0)
    twin_taught, of_taught = cross_entropy(logits, classes, weights, temperature)
    assert (ce[0], taught[0]) == pytest.approx((twin_ce, twin_taught), rel=1e-5)
    agree(gradient, SHARES[0] * of_ce + SHARES[1] * of_taught)

    a = leaf(logits)
    hard, soft = a.log_softmax(1), (a / temperature).log_softmax(1)
    loss = -SHARES[0] * (torch.tensor(counts) * hard.gather(1, torch.tensor(labels))).sum()
    loss -= SHARES[1] * (torch.tensor(weights) * soft.gather(1, torch.tensor(classes))).sum()
    loss.backward()
    assert a.grad is not None
    agree(gradient, a.grad)
    assert not gradient[21].any()


def taught(batch: list[Encoded], temperature: float, seed: int = 0) -> list[Encoded]:
    """Return a batch whose teacher names one to nine tokens a position, but for the first."""
    rng = np.random.default_rng(seed)
    made: list[Encoded] = []
    for sample in batch:
        counts = rng.integers(1, 10, len(sample.input_ids))
        counts[0] = 0
        ids = [rng.permutation(300)[:count] for count in counts]
        weights = [rng.dirichlet(np.ones(count)) if count else np.empty(0) for count in counts]
        entropy = [-(w * np.log(w)).sum() for w in weights]
        soft = SoftTargets(
            offsets=np.concatenate([[0], counts.cumsum()]),
            ids=np.concatenate(ids).astype(np.int32),
            weights=np.concatenate(weights).astype(np.float32),
            rest=np.zeros(len(counts), np.float32),
            entropy=np.array(entropy, np.float32),
            temperature=temperature,
        )
        made.append(replace(sample, soft=soft))
    return made


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
    device: Device,
    tiny_model: TinyModel,
    make_config: MakeConfig,
    make_batch: MakeBatch,
    model_type: str,
    method: str,
    quantization: str,
    temperature: float,
) -> None:
    folder = tiny_model(model_type)
    config = make_config(
        folder, **settings(temperature, method=method, model__quantization=quantization)
    )
    torch_replica, weights = driving.start(folder, config)
    replica = start(folder, config, device, weights)
    batch = taught(make_batch(7, "causal-lm"), temperature)
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


def test_the_split_into_micro_batches_does_not_matter(
    device: Device, tiny_model: TinyModel, make_config: MakeConfig, make_batch: MakeBatch
) -> None:
    """Tables have another width in each micro-batch, and the vocabulary comes in windows."""
    folder = tiny_model()
    config = make_config(folder, **settings(2.0, data__max_seq_len=48))
    weights = driving.drawn_weights(folder, config)
    batch = taught(make_batch(8, "causal-lm"), 2.0)
    narrow = Device(device.adapter, binding_limit=32 << 10)
    found: list[tuple[np.ndarray, StepResult]] = []
    for where, limit in ((device, Limit(1, 1000)), (device, Limit(8, 1000)), (narrow, None)):
        replica = start(folder, config, where, weights)
        replica.limit = limit or replica.limit
        found.append(gradient(replica, batch)[:2])
    for flat, result in found:
        assert relative(flat, found[0][0]) < 1e-6
        assert result.kl_sum == pytest.approx(found[0][1].kl_sum, rel=1e-6)


@pytest.mark.parametrize("divergence", ["reverse", "jsd"])
def test_other_divergences_are_refused_before_start(
    device: Device, tiny_model: TinyModel, make_config: MakeConfig, divergence: str
) -> None:
    folder = tiny_model()
    config = make_config(folder, **settings(1.0, distillation__divergence=divergence))
    with pytest.raises(InputError, match=rf"{divergence} is not computed by the wgpu engine"):
        WgpuReplica(folder, config, build_layout(folder, config), device)


def test_a_rest_that_nobody_sampled_is_refused(
    device: Device, tiny_model: TinyModel, make_config: MakeConfig, make_batch: MakeBatch
) -> None:
    folder = tiny_model()
    config = make_config(folder, **settings(1.0))
    replica = start(folder, config, device, driving.drawn_weights(folder, config))
    batch = taught(make_batch(3, "causal-lm"), 1.0)
    assert batch[1].soft is not None
    batch[1].soft.rest[-1] = 0.125
    with pytest.raises(InputError, match="logits whose tail is one number"):
        gradient(replica, batch)
