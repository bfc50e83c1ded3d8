"""Shares: the best split in whole samples, and its upkeep while speeds change."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.exchange.coordinator.balancer import (
    PROBE_EVERY,
    Balancer,
    Speed,
    estimate_step_seconds,
    measure_speed,
    split_by_weight,
    split_samples,
)

SPEEDS = st.builds(
    Speed, st.sampled_from([0.0, 0.1, 0.5, 2.0]), st.sampled_from([0.1, 0.25, 0.3, 1.0, 3.0])
)


def best_by_trying(samples: int, speeds: Mapping[int, Speed]) -> float:
    """Return the least seconds of any split."""
    ranks = list(speeds)
    options = (
        dict(zip(ranks, counts, strict=True))
        for counts in product(range(samples + 1), repeat=len(ranks))
        if sum(counts) == samples
    )
    return min(estimate_step_seconds(shares, speeds) for shares in options)


def drive(
    balancer: Balancer, speeds: Mapping[int, Speed], samples: int, steps: int = 1
) -> list[dict[int, int]]:
    """Let workers of these speeds run some steps and return each step's shares."""
    history: list[dict[int, int]] = []
    for _ in range(steps):
        shares = balancer.divide_samples(samples, sorted(speeds))
        for rank, count in shares.items():
            if count:
                compute = count * speeds[rank].per_sample
                balancer.observe_shard(rank, count, compute, compute + speeds[rank].overhead)
        history.append(shares)
    return history


def of(*per_second: float, overhead: float = 0.0) -> dict[int, Speed]:
    return {rank: Speed(overhead, 1 / speed) for rank, speed in enumerate(per_second)}


# One split


@settings(max_examples=150)
@given(st.integers(1, 12), st.lists(SPEEDS, min_size=1, max_size=3))
def test_no_split_is_faster(samples: int, speeds: list[Speed]):
    by_rank = dict(enumerate(speeds))
    shares = split_samples(samples, by_rank)
    assert sum(shares.values()) == samples
    assert estimate_step_seconds(shares, by_rank) == pytest.approx(best_by_trying(samples, by_rank))


def test_a_worker_with_an_overhead_above_the_step_is_idle():
    speeds = {0: Speed(0.0, 0.1), 1: Speed(1.0, 0.1)}
    assert split_samples(8, speeds) == {0: 8, 1: 0}
    assert split_samples(40, speeds)[1] > 0, "a larger batch is worth its overhead"


@pytest.mark.parametrize(("batch", "percent"), [(8, 83), (64, 97), (128, 98.5)])
def test_what_whole_samples_cost_for_speeds_10_1_1(batch: int, percent: float):
    speeds = of(10, 1, 1)
    seconds = estimate_step_seconds(split_samples(batch, speeds), speeds)
    efficiency = 100 * batch / 12 / seconds
    assert efficiency > percent
    assert seconds <= batch / 10, "never below the fastest worker alone"
    if batch == 8:
        assert efficiency == pytest.approx(83.3, abs=0.1)


@given(
    st.integers(0, 500),
    st.dictionaries(st.integers(0, 9), st.floats(0, 1e6), min_size=1).filter(
        lambda weights: sum(weights.values()) > 0
    ),
)
def test_a_weighted_split_assigns_every_sample(samples: int, weights: dict[int, float]):
    shares = split_by_weight(samples, weights)
    assert sum(shares.values()) == samples
    assert set(shares) == set(weights)
    total = sum(weights.values())
    for rank, count in shares.items():
        assert abs(count - samples * weights[rank] / total) < 1 + 1e-6


def test_a_weighted_split_is_the_same_everywhere():
    assert split_by_weight(10, {2: 1, 0: 1, 1: 1}) == {0: 4, 1: 3, 2: 3}


# Measuring


def test_a_measurement_tells_overhead_from_speed():
    assert measure_speed(4, compute=2.0, elapsed=2.5) == Speed(0.5, 0.5)
    assert measure_speed(4, compute=2.0, elapsed=1.9).overhead == 0
    assert measure_speed(4, compute=0.0, elapsed=0.0).per_sample > 0


@given(st.floats(0, 100), st.floats(1e-6, 100))
def test_estimates_come_within_an_eighth_in_three_steps(overhead: float, per_sample: float):
    speed = Speed(0.0, 1.0)
    for _ in range(3):
        speed = speed.average_in(10, 10 * per_sample, 10 * per_sample + overhead)
    assert speed.per_sample == pytest.approx(per_sample, abs=abs(1 - per_sample) / 7.9)
    assert speed.overhead == pytest.approx(overhead, abs=overhead / 7.9 + 1e-6)


# Upkeep


def test_the_first_step_is_equal_and_the_next_is_balanced():
    history = drive(Balancer("measured"), of(2, 5, 1), samples=64, steps=2)
    assert sorted(history[0].values()) == [21, 21, 22]
    assert history[1] == split_samples(64, of(2, 5, 1))


@pytest.mark.parametrize("change", [0.2, 0.5, 2.0, 5.0])
def test_a_change_of_speed_is_followed_within_5_steps(change: float):
    balancer, before = Balancer("measured"), of(10, 5, 5)
    drive(balancer, before, samples=64, steps=10)
    after = {**before, 0: Speed(0.0, before[0].per_sample / change)}
    fifth = drive(balancer, after, samples=64, steps=6)[-1]
    best = estimate_step_seconds(split_samples(64, after), after)
    assert estimate_step_seconds(fifth, after) <= 1.15 * best


@settings(max_examples=50)
@given(st.lists(st.sampled_from([0.97, 0.99, 1.0, 1.01, 1.03]), min_size=5, max_size=30))
def test_noise_does_not_move_the_split(noise: list[float]):
    balancer, speeds = Balancer("measured"), of(10, 5, 5)
    settled = drive(balancer, speeds, samples=64, steps=4)[-1]
    for factor in noise:
        shaken = {rank: Speed(0, speed.per_sample * factor) for rank, speed in speeds.items()}
        assert drive(balancer, shaken, samples=64) == [settled]


def test_an_idle_worker_is_tried_again_and_comes_back_when_it_got_faster():
    balancer = Balancer("measured")
    slow, fast = {0: Speed(0, 0.1), 1: Speed(5, 0.1)}, {0: Speed(0, 0.1), 1: Speed(0, 0.1)}
    measuring = 2  # what comes on top of a first shard is start-up: the second one shows it
    drive(balancer, slow, samples=16, steps=measuring)
    history = drive(balancer, slow, samples=16, steps=2 * PROBE_EVERY)
    probes = [step for step, shares in enumerate(history) if shares[1]]
    assert [history[step][1] for step in probes] == [1, 1]
    assert probes[1] - probes[0] == PROBE_EVERY
    assert all(sum(shares.values()) == 16 for shares in history)
    back = drive(balancer, fast, samples=16, steps=8 * PROBE_EVERY)
    assert back[-1][1] > 1


def test_newcomers_count_as_typical_until_measured():
    balancer = Balancer("measured")
    drive(balancer, of(10, 1), samples=22, steps=3)
    shares = balancer.divide_samples(32, [0, 1, 2])
    assert shares[2] in (shares[0], shares[1])


@pytest.mark.parametrize("policy", ["equal", (1.0, 1.0, 1.0)])
def test_a_fixed_policy_ignores_measurements(policy: str | tuple[float, ...]):
    history = drive(Balancer(policy), of(10, 1, 1), samples=12, steps=4)
    assert all(shares == {0: 4, 1: 4, 2: 4} for shares in history)


def test_a_list_of_weights_is_by_rank():
    balancer = Balancer((3.0, 1.0))
    assert balancer.divide_samples(8, [0, 1]) == {0: 6, 1: 2}
    assert balancer.divide_samples(8, [1, 2]) == {1: 4, 2: 4}, "a rank beyond the list weighs 1"
    assert Balancer((1.0, 0.0)).divide_samples(8, [1]) == {1: 8}, "somebody must do the work"


def test_work_outside_the_step_is_in_proportion():
    balancer = Balancer("measured")
    assert balancer.divide_proportionally(9, [0, 1, 2]) == {0: 3, 1: 3, 2: 3}
    drive(balancer, of(6, 3, 3), samples=16, steps=4)
    assert balancer.divide_proportionally(12, [0, 1, 2]) == {0: 6, 1: 3, 2: 3}
    assert balancer.divide_proportionally(9, [0, 1]) == {0: 6, 1: 3}


def test_the_expected_time_is_of_what_was_measured():
    balancer = Balancer("measured")
    assert balancer.estimate_seconds({0: 5, 1: 5}) == 0
    balancer.observe_shard(0, 5, compute=1.0, elapsed=9.0)
    assert balancer.estimate_seconds({0: 10, 1: 99}) == pytest.approx(2.0), (
        "start-up does not count"
    )
    balancer.observe_shard(0, 5, compute=1.0, elapsed=1.5)
    assert balancer.estimate_seconds({0: 10, 1: 99}) == pytest.approx(2.25)
