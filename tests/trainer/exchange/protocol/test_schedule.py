"""The plan of steps covers every epoch exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.run import load_config
from trainer.exchange.protocol.schedule import StepPlan, flush_periods


@given(
    st.integers(1, 50),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(0, 9),
    st.integers(0, 200),
)
def test_every_sample_of_every_epoch_once(
    samples: int, batch_size: int, epochs: int, inner_steps: int, rounds_after: int
):
    """Also with rounds, that begin anywhere in an epoch."""
    plan = StepPlan(samples, batch_size, epochs).with_outer_steps((rounds_after, inner_steps))
    seen = [
        (at.epoch, position)
        for at in map(plan.find_samples, range(plan.total_steps))
        for position in range(at.start, at.stop)
    ]
    assert seen == [(epoch, position) for epoch in range(epochs) for position in range(samples)]


@pytest.mark.parametrize(("max_steps", "total"), [(None, 6), (4, 4), (100, 100)])
def test_steps_win_over_epochs(max_steps: int | None, total: int):
    plan = StepPlan(20, 8, 2, max_steps)
    assert plan.total_steps == total
    assert plan.find_samples(total - 1).epoch == (total - 1) // 3


def test_checkpoints_validations_and_the_end_are_settled():
    rounds = {"exchange.schedule": "rounds"}
    ends = {"checkpoint.every": 6, "training.evaluate_every": 5}
    between = {"exchange.flush_every": 4}
    for changes, flushed in (
        ({**ends, "exchange.codec": "int8"}, set(range(11))),
        ({**ends, **rounds}, {4, 5, 9, 10}),
        ({**ends, **rounds, **between}, {3, 4, 5, 7, 9, 10}),
        ({"checkpoint.every": 100, **rounds}, {10}),
    ):
        config = load_config("quickstart", {"training.evaluate_every": 0, **changes})
        plan = StepPlan(20, 8, 2, 11, 1, flush_periods(config))
        assert {step for step in range(11) if plan.flushes_residuals(step)} == flushed


@given(
    st.integers(1, 50),
    st.integers(1, 20),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(1, 9),
    st.integers(0, 60),
)
def test_rounds_take_the_samples_of_their_inner_steps(
    samples: int, batch_size: int, max_steps: int | None, inner_steps: int, rounds_after: int
):
    """So a schedule of the learning rate, and a budget of tokens, are those of single steps."""
    plan = StepPlan(samples, batch_size, 2, max_steps).with_outer_steps((rounds_after, inner_steps))
    single = StepPlan(samples, batch_size, 2, max_steps)
    assert plan.total_inner == single.total_steps
    numbers = [number for step in range(plan.total_steps) for number in plan.find_inner_steps(step)]
    assert numbers == list(range(plan.total_inner))
    for step in range(plan.total_steps):
        taken = [single.find_samples(number) for number in plan.find_inner_steps(step)]
        assert len(taken) == 1 if step < rounds_after else len(taken) <= inner_steps
        assert plan.is_outer_step(step) == (step >= rounds_after)
        if len(taken) < inner_steps and plan.is_outer_step(step):
            last = plan.find_inner_steps(step)[-1] + 1
            assert last % plan.batches_per_epoch == 0 or last == plan.total_inner
        assert plan.find_samples(step).epoch == taken[0].epoch == taken[-1].epoch
        assert (plan.find_samples(step).start, plan.find_samples(step).stop) == (
            taken[0].start,
            taken[-1].stop,
        )


def test_settled_steps():
    plan = StepPlan(100, 2, 1, None, 5, (4, 6))
    assert plan.total_steps == 10
    assert [step + 1 for step in range(10) if plan.flushes_residuals(step)] == [4, 6, 8, 10]
    assert [plan.count_flushed(done) for done in range(11)] == [
        0,
        0,
        0,
        0,
        20,
        20,
        30,
        30,
        40,
        40,
        50,
    ]
    after = plan.with_outer_steps((7, 5))
    assert after.total_steps == 7 + 9
    assert [step + 1 for step in range(16) if after.flushes_residuals(step)] == [4, 6, 7, 8, 12, 16]
    assert [after.count_flushed(done) for done in (6, 7, 8, 9)] == [6, 7, 12, 12]
    at_the_end = StepPlan(100, 2, 1, flush_every=())
    assert [step + 1 for step in range(50) if at_the_end.flushes_residuals(step)] == [50]


@pytest.mark.parametrize("rounds", [None, (0, 4), (30, 4), (500, 4)])
def test_a_plan_says_which_steps_are_rounds(rounds: tuple[int, int] | None):
    plan = StepPlan(20, 8, 2, 40).with_outer_steps(rounds)
    assert plan.outer_steps == rounds
    assert plan.first_outer_step == (None if rounds is None else min(rounds[0], 40))
    assert plan.with_outer_steps(None) == StepPlan(20, 8, 2, 40)
