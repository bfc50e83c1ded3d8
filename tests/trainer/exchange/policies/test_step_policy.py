"""The two step policies: when members exchange, what they send, and how it is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.trainer.exchange.exact_problem import ExactProblem
from trainer.exchange.policies.step_policy import EveryStep, OuterSteps, make_policy
from trainer.optimizer.adamw import TrainState

OUTER: dict[str, Any] = {
    "exchange__schedule": "rounds",
    "exchange__inner_steps": 2,
    "exchange__rounds_after": 3,
    "training__batch_size": 4,
    "training__evaluate_every": 0,
    "checkpoint__every": 2,
}


def policy(**settings: Any) -> EveryStep:
    problem = ExactProblem(samples=20, method="full", **settings)
    return make_policy(problem.config, problem.layout, problem.plan, lambda *_, **__: None)


def test_every_step_sends_gradients_and_nothing_else() -> None:
    made = policy()
    assert not isinstance(made, OuterSteps)
    for step in range(made.plan.total_steps):
        terms = made.make_terms(step)
        assert (terms.inner_steps, terms.second_moments, terms.flushes_residuals) == (
            0,
            False,
            True,
        )
        assert made.clip_scale(step, 1e9) < 1


def test_outer_steps_begin_after_the_ordinary_ones() -> None:
    made = policy(**OUTER)
    steps = range(made.plan.total_steps)
    assert [made.make_terms(step).inner_steps for step in steps] == [0] * 3 + [2] * (len(steps) - 3)
    for step in steps:
        flushes = made.plan.flushes_residuals(step)
        assert made.make_terms(step).second_moments == (step >= 3 and flushes)
        assert (made.clip_scale(step, 1e9) == 1) == (step >= 3), "inner steps clip"


@pytest.mark.parametrize("settings", [{}, OUTER], ids=["every step", "outer steps"])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "auto"])
def test_only_outer_steps_in_int4_have_residuals(codec: str, settings: dict[str, Any]) -> None:
    made = policy(**{**settings, "exchange__codec": codec, "checkpoint__every": 3})
    due = codec == "int4" and settings is OUTER
    assert made.codec.has_feedback == due
    assert [made.residuals.has_residuals(step) for step in range(3)] == [False, False, due]


@pytest.mark.parametrize("codec", ["int8", "auto"])
def test_second_moments_are_never_quantised(codec: str) -> None:
    """A small one that became zero would divide a step."""
    made = policy(**OUTER, exchange__codec=codec)
    terms = [made.make_terms(step) for step in range(made.plan.total_steps)]
    assert any(each.second_moments for each in terms)
    assert all(each.in_bf16 for each in terms if each.second_moments)
    assert [each.in_bf16 for each in terms[:2]] == [codec == "auto", True]


def test_an_outer_step_moves_weights_by_the_mean_displacement() -> None:
    made = policy(**OUTER, exchange__outer_learning_rate=1.0, exchange__outer_momentum=0.0)
    size = made.wire_layout.size // 2
    state = TrainState.create(np.ones(size, np.float32))
    state.step = 3
    made.apply_update(state, np.full(size, 0.25, np.float32), 1e-3, 1.0)
    assert state.step == 4
    np.testing.assert_array_equal(state.weights, np.float32(0.75))
