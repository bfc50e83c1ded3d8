"""The student's update is the one of every other run, on the device, and refuses NaN and Inf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.config.optimizer import OptimizerConfig
from trainer.distill.student.optimizer import StudentOptimizer
from trainer.model.layout import Block, GradientLayout, TensorSlot
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.system.errors import NonFiniteError

SETTINGS = OptimizerConfig(weight_decay=0.3, beta1=0.8, beta2=0.95, epsilon=1e-6, max_grad_norm=5)
SHAPES = ((30, 25), (40, 2), (33,), (8, 4, 2), (1,), (70, 10))


@pytest.fixture
def layout() -> GradientLayout:
    slots: list[TensorSlot] = []
    start = 0
    for index, shape in enumerate(SHAPES):
        slots.append(TensorSlot(f"tensor{index}", shape, start))
        start = slots[-1].stop
    inner, last = tuple(slots[:-1]), slots[-1]
    blocks = (
        Block(0, "layers.0", 0, last.start, inner),
        Block(1, "head", last.start, start, (last,)),
    )
    return GradientLayout(blocks, num_layers=1)


class Trained:
    """Weights, a gradient and their optimizer, as a replica holds them."""

    def __init__(self, layout: GradientLayout, weights: np.ndarray) -> None:
        self.weights = torch.from_numpy(weights.copy())
        self.gradient = torch.zeros(layout.size)
        self.optimizer = StudentOptimizer(SETTINGS, layout, self.weights, self.gradient)

    def step(self, step: int, gradient: np.ndarray, rate: float = 0.01, weight: int = 7) -> float:
        self.gradient.copy_(torch.from_numpy(gradient))
        return self.optimizer.apply(step, rate, weight)


def draw(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_it_moves_as_every_run_does(layout: GradientLayout) -> None:
    """Against the NumPy twin, with decay on matrices alone and a gradient that is clipped."""
    student = Trained(layout, draw(layout.size, 0))
    twin, state = AdamW(SETTINGS, layout), TrainState.create(draw(layout.size, 0))
    for step in range(1, 21):
        gradient = 7 * draw(layout.size, step) / (1 + step % 3) ** 2
        norm = float(np.linalg.norm(gradient.astype(np.float64) / 7))
        assert student.step(step, gradient, 0.1 / step) == pytest.approx(norm, rel=1e-5)
        twin.apply(state, (gradient / 7).astype(np.float32), 0.1 / step, min(1.0, 5 / norm))
    snapshot = student.optimizer.snapshot(20)
    for ours, theirs in (
        (snapshot.weights, state.weights),
        (snapshot.first_moment, state.first_moment),
        (snapshot.second_moment, state.second_moment),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_norm_of_many_small_numbers_is_whole() -> None:
    """A sum of their squares in fp32 would lack 1e-4 of it already at this size."""
    size = 1 << 23
    slot = TensorSlot("tensor", (size,), 0)
    layout = GradientLayout((Block(0, "layers.0", 0, size, (slot,)),), num_layers=1)
    gradient = draw(size, 1)
    norm = float(np.linalg.norm(gradient.astype(np.float64)))
    assert Trained(layout, draw(size, 0)).step(1, gradient, weight=1) == pytest.approx(norm, 1e-5)


def test_a_snapshot_stays_as_it_was(layout: GradientLayout) -> None:
    student = Trained(layout, draw(layout.size, 0))
    snapshot = student.optimizer.snapshot(0)
    student.step(1, draw(layout.size, 1))
    np.testing.assert_array_equal(snapshot.weights, draw(layout.size, 0))
    assert not snapshot.first_moment.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_moves_nothing(layout: GradientLayout, value: float) -> None:
    student = Trained(layout, draw(layout.size, 0))
    student.step(1, draw(layout.size, 1))
    before = student.optimizer.snapshot(1)
    gradient = draw(layout.size, 2)
    gradient[-3] = value
    kind = "NaN" if np.isnan(value) else "Inf"
    expected = rf"step 2: {kind} in the gradient of block head, tensor tensor5: the run is halted"
    with pytest.raises(NonFiniteError, match=expected):
        student.step(2, gradient)
    after = student.optimizer.snapshot(1)
    np.testing.assert_array_equal(before.weights, after.weights)
    np.testing.assert_array_equal(before.first_moment, after.first_moment)


def test_a_norm_beyond_fp32_is_told_apart(layout: GradientLayout) -> None:
    student = Trained(layout, draw(layout.size, 0))
    with pytest.raises(NonFiniteError, match="step 1: the norm of the gradient overflows"):
        student.step(1, np.full(layout.size, 1e30, np.float32))


def test_a_batch_without_targets_only_decays(layout: GradientLayout) -> None:
    student = Trained(layout, draw(layout.size, 0))
    assert student.step(1, np.zeros(layout.size, np.float32), rate=0.1, weight=0) == 0.0
    expected = draw(layout.size, 0)
    for slot in layout.iter_tensors():
        if len(slot.shape) >= 2:
            expected[slot.start : slot.stop] *= 1 - 0.1 * 0.3
    np.testing.assert_allclose(student.weights.numpy(), expected, rtol=1e-6)
