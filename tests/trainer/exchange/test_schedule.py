"""The plan of steps covers every epoch exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.exchange.protocol.schedule import StepPlan


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
