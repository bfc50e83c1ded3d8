"""The schedule of a soak: drawn from its seed alone, and such that every fault can be seen."""

from __future__ import annotations

import pytest

from tests.soak.schedule import CALM, KINDS, REST, draw


def test_the_same_seed_gives_the_same_faults_at_the_same_times() -> None:
    assert draw(7, 3600, 1000) == draw(7, 3600, 1000)
    assert draw(7, 3600, 1000) != draw(8, 3600, 1000)


def test_a_schedule_that_was_reported_can_be_repeated() -> None:
    """A change of the draw makes the seeds of earlier reports worthless: say so there."""
    first, *_, last = draw(7, 3600, 1000)
    assert (first.at, first.kind, first.target) == (1.067, "stop worker", "worker-0")
    assert (last.at, last.kind, last.target) == (3596.767, "stop worker", "worker-0")


def test_faults_come_in_order_over_the_whole_time() -> None:
    faults = draw(3, 600, 100)
    assert len(faults) == 100
    times = [fault.at for fault in faults]
    assert times == sorted(times)
    assert 0 <= times[0] < 6
    assert 594 <= times[-1] < 600


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_comes_and_weights_are_kept(seed: int) -> None:
    kinds = [fault.kind for fault in draw(seed, 3600, 1000)]
    assert set(kinds) == set(KINDS)
    assert {fault.kind for fault in draw(seed, 120, 16)} == set(KINDS)
    assert kinds.count("cut") > kinds.count("kill worker") > kinds.count("kill supervisor")


@pytest.mark.parametrize("seed", range(20))
def test_no_two_faults_touch_the_same_thing_at_once(seed: int) -> None:
    over: dict[str, float] = {}
    for fault in draw(seed, 3600, 1000):
        assert fault.at >= over.get(fault.touches, 0.0), fault
        over[fault.touches] = fault.at + (REST if KINDS[fault.kind].kills else fault.seconds)


def test_a_short_and_dense_soak_can_be_drawn_whatever_the_seed() -> None:
    for seed in range(200):
        assert len(draw(seed, 45, 16)) == 16
    assert {fault.kind for fault in draw(7, 45, 16)} == set(KINDS)  # as test_soak.py runs it


def test_nothing_is_killed_in_the_last_part() -> None:
    late = [fault for fault in draw(5, 1000, 400) if fault.at > CALM * 1000 + 3]
    assert late
    assert not any(KINDS[fault.kind].kills for fault in late)


def test_a_kind_that_cannot_be_done_here_is_left_out() -> None:
    kinds = {fault.kind for fault in draw(7, 600, 200, without=["full disk", "clock jump"])}
    assert kinds == set(KINDS) - {"full disk", "clock jump"}


def test_more_faults_than_the_time_has_room_for() -> None:
    with pytest.raises(ValueError, match="everything is disturbed"):
        draw(7, 1, 100)
