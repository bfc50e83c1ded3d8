"""The plan of steps covers every epoch exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.run import load_config
from trainer.exchange.protocol.schedule import StepPlan, settle_periods


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
    plan = StepPlan(samples, batch_size, epochs).with_rounds((rounds_after, inner_steps))
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
    for changes, settled in (
        ({**ends, "exchange.codec": "bf16"}, set(range(11))),
        ({**ends, **codec}, {4, 5, 9, 10}),
        ({**ends, **codec, **between}, {3, 4, 5, 7, 9, 10}),
        ({"checkpoint.every": 100, **codec}, {10}),
    ):
        config = load_config("quickstart", {"training.evaluate_every": 0, **changes})
        plan = StepPlan(20, 8, 2, 11, 1, settle_periods(config))
        assert {step for step in range(11) if plan.settles(step)} == settled


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
    plan = StepPlan(samples, batch_size, 2, max_steps).with_rounds((rounds_after, inner_steps))
    single = StepPlan(samples, batch_size, 2, max_steps)
    assert plan.total_inner == single.total_steps
    numbers = [number for step in range(plan.total_steps) for number in plan.inner(step)]
    assert numbers == list(range(plan.total_inner))
    for step in range(plan.total_steps):
        taken = [single.at(number) for number in plan.inner(step)]
        assert len(taken) == 1 if step < rounds_after else len(taken) <= inner_steps
        assert plan.is_round(step) == (step >= rounds_after)
        if len(taken) < inner_steps and plan.is_round(step):
            last = plan.inner(step)[-1] + 1
            assert last % plan.batches_per_epoch == 0 or last == plan.total_inner
        assert plan.at(step).epoch == taken[0].epoch == taken[-1].epoch
        assert (plan.at(step).start, plan.at(step).stop) == (taken[0].start, taken[-1].stop)


def test_settled_steps():
    plan = StepPlan(100, 2, 1, None, 5, (4, 6))
    assert plan.total_steps == 10
    assert [step + 1 for step in range(10) if plan.settles(step)] == [4, 6, 8, 10]
    assert [plan.settled(done) for done in range(11)] == [0, 0, 0, 0, 20, 20, 30, 30, 40, 40, 50]
    after = plan.with_rounds((7, 5))
    assert after.total_steps == 7 + 9
    assert [step + 1 for step in range(16) if after.settles(step)] == [4, 6, 7, 8, 12, 16]
    assert [after.settled(done) for done in (6, 7, 8, 9)] == [6, 7, 12, 12]
    at_the_end = StepPlan(100, 2, 1, settle_every=())
    assert [step + 1 for step in range(50) if at_the_end.settles(step)] == [50]


@pytest.mark.parametrize("rounds", [None, (0, 4), (30, 4), (500, 4)])
def test_a_plan_says_which_steps_are_rounds(rounds: tuple[int, int] | None):
    plan = StepPlan(20, 8, 2, 40).with_rounds(rounds)
    assert plan.rounds == rounds
    assert plan.first_round == (None if rounds is None else min(rounds[0], 40))
    assert plan.with_rounds(None) == StepPlan(20, 8, 2, 40)
