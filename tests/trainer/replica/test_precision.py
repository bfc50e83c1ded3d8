"""`training.precision`: bf16 and fp16 beside fp32, and fp16's loss scale when it overflows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from tests.trainer.replica.driving import METHODS, TASKS, gradient, relative, start
from trainer.replica.torch.precision import SCALE_OF_SUM, LossScale

if TYPE_CHECKING:
    from tests.conftest import MakeConfig, TinyModel
    from tests.trainer.replica.conftest import MakeBatch

NEAR = {"bf16": 0.05, "fp16": 0.01}
"""Relative distance of a gradient: formats of 8 and 11 bits."""


@pytest.mark.parametrize(("method", "quantization"), METHODS)
@pytest.mark.parametrize("task", TASKS)
def test_gradients_of_16_bits_are_near_those_of_fp32(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    make_batch: MakeBatch,
    method: str,
    quantization: str,
    task: str,
) -> None:
    folder, batch = tiny_model(), make_batch(6, task)
    settings = {"task": task, "method": method, "model__quantization": quantization}
    wanted, result, order = gradient(start(folder, make_config(folder, **settings))[0], batch)
    for precision, near in NEAR.items():
        config = make_config(folder, **settings, training__precision=precision)
        found, same, sent = gradient(start(folder, config)[0], batch)
        assert 1e-7 < relative(found, wanted) < near, precision
        assert same.loss_sum == pytest.approx(result.loss_sum, rel=near)
        assert sent == order


def test_a_gradient_that_overflows_is_computed_again_before_any_block_is_sent(
    tiny_model: TinyModel,
    make_config: MakeConfig,
    make_batch: MakeBatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A head of large weights sends gradients beyond 65,504 back into fp16 products."""
    folder, batch = tiny_model(), make_batch(6)
    found: dict[str, np.ndarray] = {}
    for precision in ("fp32", "fp16"):
        config = make_config(folder, method="full", training__precision=precision)
        replica, weights = start(folder, config)
        steep = weights.copy()
        for slot in replica.layout.tensors():
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


def test_what_no_scale_is_the_reason_of_is_passed_on(
    tiny_model: TinyModel, make_config: MakeConfig, make_batch: MakeBatch
) -> None:
    """The coordinator then halts the run and names the tensor (F-DP-003)."""
    folder = tiny_model()
    replica, weights = start(folder, make_config(folder, training__precision="fp16"))
    poisoned = weights.copy()
    poisoned[0] = np.nan
    replica.write_trainable(poisoned)
    flat, result, order = gradient(replica, make_batch(3))
    assert order == list(replica.layout.send_order)
    assert np.isnan(flat).any()
    assert np.isnan(result.loss_sum)


def test_a_gradient_that_is_never_finite_ends_the_attempts(
    tiny_model: TinyModel, make_config: MakeConfig
) -> None:
    config = make_config(tiny_model(), training__precision="fp16")
    scale = LossScale(config, torch.device("cpu"), 2.0**16)
    attempts = 1
    while not scale.settle([torch.tensor([1.0, torch.inf])], torch.ones(3)):
        attempts += 1
    assert attempts == 24
    gradient = torch.tensor([scale.value, -2 * scale.value])
    assert scale.settle([gradient], torch.ones(3))
    assert gradient.tolist() == [1, -2]


def test_other_formats_have_no_scale(tiny_model: TinyModel, make_config: MakeConfig) -> None:
    config = make_config(tiny_model(), training__precision="bf16")
    scale = LossScale(config, torch.device("cpu"), 2.0**16)
    assert (scale.on, scale.value) == (False, 1)
    assert scale.settle([torch.tensor([torch.inf])], torch.ones(3))
