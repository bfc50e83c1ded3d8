"""The plan of steps covers every epoch exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.run import load
from trainer.exchange.protocol.schedule import StepPlan, settle_periods


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 3))
def test_every_sample_of_every_epoch_once(samples: int, batch_size: int, epochs: int):
    plan = StepPlan(samples, batch_size, epochs)
    seen = [
        (at.epoch, position)
        for at in map(plan.at, range(plan.total_steps))
        for position in range(at.start, at.stop)
    ]
    assert seen == [(epoch, position) for epoch in range(epochs) for position in range(samples)]


@pytest.mark.parametrize(("max_steps", "total"), [(None, 6), (4, 4), (100, 100)])
def test_steps_win_over_epochs(max_steps: int | None, total: int):
    plan = StepPlan(20, 8, 2, max_steps)
    assert plan.total_steps == total
    assert plan.at(total - 1).epoch == (total - 1) // 3


def test_checkpoints_validations_and_the_end_are_settled():
    codec = {"exchange.codec": "int8"}
    ends = {"checkpoint.every": 6, "training.evaluate_every": 5}
    between = {"exchange.settle_every": 4}
    for settings, settled in (
        ({**ends, "exchange.codec": "bf16"}, set(range(11))),
        ({**ends, **codec}, {4, 5, 9, 10}),
        ({**ends, **codec, **between}, {3, 4, 5, 7, 9, 10}),
        ({"checkpoint.every": 100, **codec}, {10}),
    ):
        config = load("quickstart", {"training.evaluate_every": 0, **settings})
        plan = StepPlan(20, 8, 2, 11, settle_periods(config))
        assert {step for step in range(11) if plan.settles(step)} == settled
