"""The outer update follows torch's SGD with Nesterov momentum on the pseudo-gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.exchange.exact_problem import tiny_layout
from trainer.config.run import load
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.nesterov import OuterNesterov, make_update

LAYOUT = tiny_layout()


def drawn(seed: int, size: int = LAYOUT.size) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_follows_torch_sgd_with_nesterov_momentum(rate: float, momentum: float):
    state = TrainState.fresh(drawn(0))
    parameter = torch.nn.Parameter(torch.from_numpy(state.weights.copy()))
    reference = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=momentum > 0)
    update = OuterNesterov(rate, momentum, LAYOUT)
    for step in range(1, 11):
        moved = drawn(step)
        update.apply(state, moved, 0.0, update.clip_scale(1e9))
        parameter.grad = torch.from_numpy(moved)
        reference.step()
        assert state.step == step
        np.testing.assert_array_equal(moved, drawn(step), "the average is left alone")
    np.testing.assert_allclose(state.weights, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert not state.second_moment.any()


def test_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch):
    def run() -> bytes:
        state, update = TrainState.fresh(drawn(0)), OuterNesterov(0.7, 0.9, LAYOUT)
        for step in range(1, 4):
            update.apply(state, drawn(step, 2 * LAYOUT.size), 0.0, 1.0)
        return state.digest().encode()

    whole = run()
    monkeypatch.setattr("trainer.optimizer.nesterov.CHUNK", 7)
    assert run() == whole


def test_only_a_settled_commit_changes_the_second_moment():
    state = TrainState.fresh(drawn(0))
    update = OuterNesterov(0.7, 0.9, LAYOUT)
    both = drawn(1, 2 * LAYOUT.size)
    update.apply(state, both, 0.0, 1.0)
    np.testing.assert_array_equal(state.second_moment, both[LAYOUT.size :])
    update.apply(state, drawn(2), 0.0, 1.0)
    np.testing.assert_array_equal(state.second_moment, both[LAYOUT.size :])


def test_a_snapshot_never_changes():
    state = TrainState.fresh(drawn(0))
    snapshot = state.snapshot()
    OuterNesterov(0.7, 0.9, LAYOUT).apply(state, drawn(1, 2 * LAYOUT.size), 0.0, 1.0)
    np.testing.assert_array_equal(snapshot.weights, drawn(0))
    assert not snapshot.first_moment.any()
    assert not snapshot.second_moment.any()


def test_the_schedule_says_which_update():
    config = load("quickstart")
    assert isinstance(make_update(config, LAYOUT), AdamW)
    config = config.with_settings({"exchange.schedule": "rounds"})
    assert isinstance(make_update(config, LAYOUT), OuterNesterov)
