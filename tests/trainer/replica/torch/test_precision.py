"""`training.precision`: bf16 and fp16 beside fp32, and fp16's loss scale when it overflows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import METHODS, TASKS, gradient, relative
from trainer.replica.torch.precision import SCALE_OF_SUM, LossScale

if TYPE_CHECKING:
    from tests.trainer.tiny import Tiny

NEAR = {"bf16": 0.05, "fp16": 0.01}
"""Relative distance of a gradient: formats of 8 and 11 bits."""


@pytest.mark.parametrize(("method", "quantization"), METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_gradients_of_16_bits_are_near_those_of_fp32(
    tiny: Tiny, method: str, quantization: str, task: str
) -> None:
    batch = tiny.batch(6, task)
    settings = {"task": task, "method": method, "model__quantization": quantization}
    wanted, result, order = gradient(tiny.start(**settings)[0], batch)
    for precision, near in NEAR.items():
        found, same, sent = gradient(
            tiny.start(**settings, training__precision=precision)[0], batch
        )
        assert 1e-7 < relative(found, wanted) < near, precision
        assert same.loss_sum == pytest.approx(result.loss_sum, rel=near)
        assert sent == order


def test_a_gradient_that_overflows_is_computed_again_before_any_block_is_sent(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of large weights sends gradients beyond 65,504 back into fp16 products."""
    batch = tiny.batch(6)
    found: dict[str, np.ndarray] = {}
    for precision in ("fp32", "fp16"):
        replica, weights = tiny.start(method="full", training__precision=precision)
        steep = weights.copy()
        for slot in replica.layout.iter_tensors():
            if slot.name == "score.weight":
                steep[slot.start : slot.stop] *= 3e4
        replica.write_trainable(steep)
        with caplog.at_level(logging.WARNING):
            found[precision], result, order = gradient(replica, batch)
        assert order == list(replica.layout.send_order)
        assert np.isfinite(result.loss_sum)
    again = [line for line in caplog.messages if "overflowed in fp16 with loss scale" in line]
    assert again
    assert f"loss scale {SCALE_OF_SUM:g}:" in again[0]
    assert np.isfinite(found["fp16"]).all()
    assert relative(found["fp16"], found["fp32"]) < 0.05
    # The scale stays: the next gradient is right at once.
    caplog.clear()
    assert np.array_equal(gradient(replica, batch)[0], found["fp16"])
    assert not caplog.messages


def test_a_gradient_that_is_never_finite_ends_the_attempts(tiny: Tiny) -> None:
    config = tiny.config(tiny.model(), training__precision="fp16")
    scale = LossScale(config, torch.device("cpu"), 2.0**16)
    attempts = 1
    while not scale.unscale_gradients([torch.tensor([1.0, torch.inf])], torch.ones(3)):
        attempts += 1
    assert attempts == 24
    gradient = torch.tensor([scale.value, -2 * scale.value])
    assert scale.unscale_gradients([gradient], torch.ones(3))
    assert gradient.tolist() == [1, -2]


def test_other_formats_have_no_scale(tiny: Tiny) -> None:
    config = tiny.config(tiny.model(), training__precision="bf16")
    scale = LossScale(config, torch.device("cpu"), 2.0**16)
    assert (scale.on, scale.value) == (False, 1)
    assert scale.unscale_gradients([torch.tensor([torch.inf])], torch.ones(3))
