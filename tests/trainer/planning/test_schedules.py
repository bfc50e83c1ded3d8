"""Pipelines over time: every action once, after what it waits for; the formulas' bubbles."""

from __future__ import annotations

import itertools

import pytest

from trainer.config.parallel import Schedule
from trainer.planning.schedules import UNITS, Action, Timeline, idle_share, timeline
from trainer.planning.strategy import SCHEDULES, Strategy
from trainer.planning.time import bubble_share

SIZES = ((1, 3), (2, 2), (2, 8), (3, 7), (4, 6), (4, 16), (8, 64))


def made_of(schedule: Schedule, stages: int, microbatches: int) -> Timeline:
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    return timeline(schedule, stages, microbatches, chunks)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_action_once_and_after_what_it_waits_for(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    made = made_of(schedule, stages, microbatches)
    chunks = 1 if schedule in ("gpipe", "1f1b") else 2
    work = 3 * chunks * microbatches  # a forward and a backward of each micro-batch and chunk
    assert [sum(UNITS[action.kind] for action in rank) for rank in made] == [work] * stages
    every = [action for rank in made for action in rank]
    down = {(a.chunk, a.microbatch): a for a in every if a.kind == "forward"}
    up = {(a.chunk, a.microbatch): a for a in every if a.kind in ("backward", "inputs")}
    assert len(down) == len(up) == stages * chunks * microbatches
    for rank in made:
        assert all(one.stop <= other.start for one, other in itertools.pairwise(rank))
    for (chunk, number), action in down.items():
        assert not chunk or down[chunk - 1, number].stop <= action.start
        assert action.stop <= up[chunk, number].start
        assert not chunk or up[chunk, number].stop <= up[chunk - 1, number].start
    for action in every:
        assert action.kind != "weights" or up[action.chunk, action.microbatch].stop <= action.start


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 16), (8, 64)])
def test_the_bubble_is_that_of_the_formula(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    strategy = Strategy(world=stages, stages=stages, schedule=schedule, microbatches=microbatches)
    found = idle_share(made_of(schedule, stages, microbatches))
    assert found == pytest.approx(bubble_share(strategy).value)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 16), (8, 64)])
def test_the_bubble_of_dualpipev_is_half_of_the_formula(stages: int, microbatches: int) -> None:
    """`(p - 1) (F&B + B - 3W)`, DualPipe's table, with an overlapped pair F&B of three units.

    A pair hands on both results at its end. Here its forward's is there after one unit, and
    the bubble is `(p - 1) W`.
    """
    strategy = Strategy(
        world=stages, stages=stages, schedule="dualpipev", microbatches=microbatches
    )
    found = idle_share(made_of("dualpipev", stages, microbatches))
    assert found == pytest.approx(bubble_share(strategy).value / 2)


def test_zero_bubble_needs_enough_micro_batches() -> None:
    """arXiv 2401.10241: 2 p - 1 of them. With fewer the zero is not reached."""
    assert idle_share(made_of("zbv", 4, 7)) == 0
    assert idle_share(made_of("zbv", 4, 6)) > 0.05


def test_stages_of_a_v_hold_the_first_and_the_last_chunk() -> None:
    made = made_of("zbv", 4, 8)
    assert [{action.chunk for action in rank} for rank in made] == [{0, 7}, {1, 6}, {2, 5}, {3, 4}]
    assert made[0][0] == Action("forward", 0, 0)
