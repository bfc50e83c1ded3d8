"""Cross-entropy over windows of classes: against torch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.replica.wgpu.on_device import agree, draw, leaf, run
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels import cross_entropy as kernels

WINDOWS = [[1], [70], [64, 6], [1, 129, 3], [16] * 5]


def cross_entropy(
    logits: np.ndarray, classes: np.ndarray, probabilities: np.ndarray, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's loss of all rows and the gradient `[N, C]` of the logits."""
    z, dense = leaf(logits), torch.zeros(logits.shape, dtype=torch.float64)
    dense.scatter_add_(1, torch.tensor(classes), torch.tensor(probabilities).double())
    loss = F.cross_entropy(z / temperature, dense, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def record(
    graph: Graph,
    classes: Array,
    probabilities: Array,
    total: Array,
    state: Array,
    *parts: Array,
    temperature: float,
) -> None:
    """Record loss and gradient; parts are windows of the logits."""
    widths = [part.shape[1] for part in parts]
    firsts = list(itertools.accumulate(widths[:-1], initial=0))
    kernels.cross_entropy_start(graph, state)
    for binder in (kernels.cross_entropy_window, kernels.cross_entropy_gradient):
        for part, first in zip(parts, firsts, strict=True):
            binder(graph, part, state, classes, probabilities, first=first, temperature=temperature)
    kernels.cross_entropy_loss(graph, state, probabilities, total)


def compute(
    device: Device,
    logits: np.ndarray,
    classes: np.ndarray,
    probabilities: np.ndarray,
    widths: list[int],
    temperature: float = 1.0,
) -> tuple[float, np.ndarray]:
    """Return the loss of all rows, on top of 0, and the gradient of the logits."""
    parts = np.split(logits, np.cumsum(widths)[:-1], axis=1)
    outputs = [np.zeros(1), np.full((len(logits), 4), np.nan), *parts]
    total, _, *gradients = run(
        device, record, [classes, probabilities], outputs, temperature=temperature
    )
    return float(total[0]), np.concatenate(gradients, 1)


def same(found: tuple[float, np.ndarray], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    agree(np.array(found[0]), expected[0])
    agree(found[1], expected[1])


@pytest.mark.parametrize("widths", WINDOWS)
@pytest.mark.parametrize("rows", [1, 67])
def test_labels_are_torchs(device: Device, rows: int, widths: list[int]) -> None:
    count = sum(widths)
    logits = 5 * draw(rows, count)
    labels = np.random.default_rng(0).integers(0, count, (rows, 1))
    ones = np.ones((rows, 1), np.float32)
    same(compute(device, logits, labels, ones, widths), cross_entropy(logits, labels, ones))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("widths", "targets"), [([70], 3), ([64, 6], 70), ([1, 129, 3], 32)])
def test_soft_targets_are_torchs(
    device: Device, widths: list[int], targets: int, temperature: float
) -> None:
    rows, count = 5, sum(widths)
    rng = np.random.default_rng(0)
    classes = np.stack([rng.permutation(count)[:targets] for _ in range(rows)])
    probabilities = rng.random((rows, targets)).astype(np.float32)
    probabilities /= probabilities.sum(1, keepdims=True) * 1.25  # a teacher's tail was cut off
    logits = 5 * draw(rows, count)
    found = compute(device, logits, classes, probabilities, widths, temperature)
    same(found, cross_entropy(logits, classes, probabilities, temperature))


def test_rows_without_probability_do_not_count_whatever_they_hold(device: Device) -> None:
    logits = draw(3, 70)
    classes = np.array([[3, 0], [1, 1], [69, 4]])
    probabilities = np.array([[1.0, 0.0], [0.0, 0.0], [0.5, 0.5]], np.float32)
    expected = cross_entropy(logits, classes, probabilities)
    logits[1] = np.nan
    found = compute(device, logits, classes, probabilities, [64, 6])
    same(found, expected)
    assert not found[1][1].any()


def test_padding_with_a_targets_own_class_takes_nothing_from_it(device: Device) -> None:
    logits, classes = draw(1, 7), np.array([[3, 3, 3]])
    probabilities = np.array([[1.0, 0.0, 0.0]], np.float32)
    _, gradient = compute(device, logits, classes, probabilities, [7])
    agree(gradient, cross_entropy(logits, classes, probabilities)[1])


def test_a_nan_in_a_row_that_counts_reaches_the_loss(device: Device) -> None:
    logits = draw(2, 70)
    logits[1, 66] = np.nan
    ones = np.ones((2, 1), np.float32)
    loss, gradient = compute(device, logits, np.array([[0], [1]]), ones, [64, 6])
    assert np.isnan(loss)
    assert np.isnan(gradient[1]).any()


def test_large_logits_do_not_overflow(device: Device) -> None:
    logits = np.array([[-1e4, 1e4, 9_999.0, -1e30], [3e4, 0.0, -3e4, 3e4]], np.float32)
    labels, ones = np.array([[2], [0]]), np.ones((2, 1), np.float32)
    found = compute(device, logits, labels, ones, [1, 2, 1])
    same(found, cross_entropy(logits, labels, ones))


def test_the_total_grows(device: Device) -> None:
    state = np.array([[2.0, 1.0, 0.5, 0.0]])
    inputs = [state, np.ones((1, 1), np.float32)]
    (total,) = run(device, kernels.cross_entropy_loss, inputs, [np.array([3.0])])
    agree(total, np.array([4.5]))


@pytest.mark.parametrize("shape", [(1, 1), (70, 2), (5, 31)])
def test_argmax_is_numpys(device: Device, shape: tuple[int, int]) -> None:
    x = draw(*shape)
    x[-1] = x[-1, 0]  # of equals the first
    (best,) = run(device, kernels.argmax_rows, [x], [np.zeros(shape[0], np.uint32)])
    np.testing.assert_array_equal(best, x.argmax(1))
