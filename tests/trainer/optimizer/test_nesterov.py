"""The outer update follows torch's SGD with Nesterov momentum on the pseudo-gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.trainer.exchange.exact_problem import tiny_layout
from trainer.config.run import load_config
from trainer.optimizer.adamw import AdamW, TrainState
from trainer.optimizer.nesterov import OuterNesterov, Update

LAYOUT = tiny_layout()


def drawn(seed: int, size: int = LAYOUT.size) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_follows_torch_sgd_with_nesterov_momentum(rate: float, momentum: float):
    state = TrainState.create(drawn(0))
    parameter = torch.nn.Parameter(torch.from_numpy(state.weights.copy()))
    reference = torch.optim.SGD([parameter], lr=rate, momentum=momentum, nesterov=momentum > 0)
    update = OuterNesterov(rate, momentum, LAYOUT)
    for step in range(1, 11):
        moved = drawn(step)
        update.apply(state, moved)
        parameter.grad = torch.from_numpy(moved)
        reference.step()
        assert state.step == step
        np.testing.assert_array_equal(moved, drawn(step), "the average is left alone")
    np.testing.assert_allclose(state.weights, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert not state.second_moment.any()


def test_chunks_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch):
    def run() -> bytes:
        state, update = TrainState.create(drawn(0)), OuterNesterov(0.7, 0.9, LAYOUT)
        for step in range(1, 4):
            update.apply(state, drawn(step, 2 * LAYOUT.size))
        return state.compute_digest().encode()

    whole = run()
    monkeypatch.setattr("trainer.optimizer.nesterov.CHUNK", 7)
    assert run() == whole


def test_only_a_settled_commit_changes_the_second_moment():
    state = TrainState.create(drawn(0))
    update = OuterNesterov(0.7, 0.9, LAYOUT)
    both = drawn(1, 2 * LAYOUT.size)
    update.apply(state, both)
    np.testing.assert_array_equal(state.second_moment, both[LAYOUT.size :])
    update.apply(state, drawn(2))
    np.testing.assert_array_equal(state.second_moment, both[LAYOUT.size :])


def test_a_snapshot_never_changes():
    state = TrainState.create(drawn(0))
    snapshot = state.take_snapshot()
    OuterNesterov(0.7, 0.9, LAYOUT).apply(state, drawn(1, 2 * LAYOUT.size))
    np.testing.assert_array_equal(snapshot.weights, drawn(0))
    assert not snapshot.first_moment.any()
    assert not snapshot.second_moment.any()


@pytest.mark.parametrize("first_round", [0, 2, 5, None])
def test_ordinary_steps_are_adamw_and_rounds_begin_with_no_momentum(first_round: int | None):
    outer_settings = {"exchange.outer_learning_rate": 0.7, "exchange.outer_momentum": 0.9}
    config = load_config("quickstart", {"exchange.schedule": "rounds", **outer_settings})
    update, adamw = Update(config, LAYOUT), AdamW(config.optimizer, LAYOUT)
    outer = OuterNesterov(0.7, 0.9, LAYOUT)
    state, expected = TrainState.create(drawn(0)), TrainState.create(drawn(0))
    for step in range(5):
        is_round = first_round is not None and step >= first_round
        update.apply(state, drawn(step), 0.01, 1.0, first_round)
        if not is_round:
            adamw.apply(expected, drawn(step), 0.01, 1.0)
        else:
            if step == first_round:
                expected.first_moment[...] = 0.0
            outer.apply(expected, drawn(step))
        assert state.compute_digest() == expected.compute_digest()
        assert update.clip_scale(10.0, is_round=is_round) == (1.0 if is_round else 0.1)


def test_a_snapshot_before_the_first_round_keeps_its_first_moment():
    """A worker that joins there, and a run that resumes there, begin the round with it."""
    update = Update(load_config("quickstart", {"exchange.schedule": "rounds"}), LAYOUT)
    state = TrainState.create(drawn(0))
    update.apply(state, drawn(1), 0.01, 1.0, 1)
    snapshot, before = state.take_snapshot(), state.first_moment.copy()
    update.apply(state, drawn(2), 0.01, 1.0, 1)
    np.testing.assert_array_equal(snapshot.first_moment, before)
    assert before.any()
