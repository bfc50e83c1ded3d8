"""The choice `auto`: its table of exposed milliseconds, its order, and its limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainer.config.codec import CODECS, FREE
from trainer.exchange.protocol.codecs import make_codec
from trainer.planning.devices import LinkRates
from trainer.planning.exchange_choice import (
    MOST_EXPOSED,
    ROUNDS_CODEC,
    ExchangeLoad,
    choose_exchange,
    element_bytes,
    exposed_by_rounds,
    exposed_seconds,
)
from trainer.system.errors import InputError

ADAPTER = 23.6e6 / 4
"""Elements of an adapter of rank 16 on q and v of Qwen3-4B, of 36 layers."""
STEPS = (0.2, 1.0, 5.0)
MEGABYTES = (118, 23.6, 6.25, 1.25)
"""Of a second: 1 Gbit/s, 200 Mbit/s, 50 Mbit/s over Wi-Fi, 10 Mbit/s."""


def exchange_of(rate: float, step: float, total_steps: int = 100_000, **more: Any) -> ExchangeLoad:
    link = LinkRates(up=rate * 1e6, down=rate * 1e6, half_duplex=rate == 6.25)
    asked = ExchangeLoad(
        link=link, elements=ADAPTER, blocks=36, step_seconds=step, total_steps=total_steps
    )
    return replace(asked, **more)


@pytest.mark.parametrize(
    ("codec", "milliseconds"),
    [
        ("fp32", [100, 11, 11, 900, 500, 56, 7452, 7052, 5052, 18780, 18380, 16380]),
        ("bf16", [6, 6, 6, 400, 28, 28, 3676, 3276, 1276, 9340, 8940, 6940]),
        ("int8", [3, 3, 3, 154, 14, 14, 1817, 1417, 53, 4694, 4294, 2294]),
    ],
)
def test_exposed_milliseconds(codec: str, milliseconds: list[int]) -> None:
    """One remote host, 23.6 MB of fp32, steps of 0.2, 1 and 5 s over each link."""
    found = [
        1000 * exposed_seconds(exchange_of(rate, step), codec).value
        for rate in MEGABYTES
        for step in STEPS
    ]
    assert found == pytest.approx(milliseconds, abs=0.51)


@pytest.mark.parametrize(
    ("every", "milliseconds"), [(50, [0.6, 2.8, 21, 53]), (500, [0.06, 0.28, 2.1, 5.3])]
)
def test_exposed_milliseconds_of_rounds(every: int, milliseconds: list[float]) -> None:
    """Each step's part of a round of int4: it does not depend on how long a step takes."""
    for step in STEPS:
        found = [
            1000 * exposed_by_rounds(exchange_of(rate, step), every).value for rate in MEGABYTES
        ]
        assert found == pytest.approx(milliseconds, rel=0.071)  # they have two digits


@pytest.mark.parametrize(
    ("rate", "step", "codec"),
    [
        (118, 0.2, "bf16"),
        (118, 5, "bf16"),
        (23.6, 0.2, ROUNDS_CODEC),
        (23.6, 1, "bf16"),
        (23.6, 5, "bf16"),
        (6.25, 0.2, ROUNDS_CODEC),
        (6.25, 1, ROUNDS_CODEC),
        (6.25, 5, "int8"),
        (1.25, 0.2, ROUNDS_CODEC),
        (1.25, 1, ROUNDS_CODEC),
        (1.25, 5, ROUNDS_CODEC),
    ],
)
def test_the_first_that_a_step_hides_is_taken(rate: float, step: float, codec: str) -> None:
    choice = choose_exchange(exchange_of(rate, step))
    assert choice.codec == codec
    assert choice.within
    assert choice.taken.exposed.value <= MOST_EXPOSED * step * 1.000001
    assert (choice.every > 1) == (codec == ROUNDS_CODEC)
    order = [one.codec for one in choice.candidates]
    assert order == [*FREE, ROUNDS_CODEC]
    for better in choice.candidates[: order.index(codec)]:
        assert better.exposed.value > MOST_EXPOSED * step


def test_rounds_are_as_short_as_the_limit_allows() -> None:
    asked = exchange_of(6.25, 1.0)
    every = choose_exchange(asked).every
    assert exposed_by_rounds(asked, every).value <= 0.05 < exposed_by_rounds(asked, every - 1).value


def test_a_run_has_at_least_twenty_rounds() -> None:
    """H* is 21 steps here: a run of 420 has twenty of those, one of 419 does not."""
    assert choose_exchange(exchange_of(6.25, 1.0, 420)).every == 21
    short = choose_exchange(exchange_of(6.25, 1.0, 419))
    assert (short.codec, short.every, short.within) == (ROUNDS_CODEC, 20, False)
    assert [one.every for one in short.candidates] == [1, 1, 20]
    shortest = choose_exchange(exchange_of(6.25, 1.0, 19))
    assert ROUNDS_CODEC not in [one.codec for one in shortest.candidates]


def test_where_nothing_is_hidden_the_least_is_taken_and_said_so() -> None:
    choice = choose_exchange(exchange_of(0.125, 0.2, 19))
    assert (choice.codec, choice.within) == (FREE[-1], False)
    assert choice.taken.exposed_ms == min(one.exposed_ms for one in choice.candidates)
    longer = choose_exchange(exchange_of(0.0125, 0.2, 2000))
    assert (longer.codec, longer.every, longer.within) == (ROUNDS_CODEC, 100, False)


def test_the_centre_carries_every_remote_host() -> None:
    one, three = (exposed_seconds(exchange_of(23.6, 0.2, remotes=n), "fp32").value for n in (1, 3))
    assert three - one == pytest.approx(2 * 23.6 / 23.6)
    fast = LinkRates(up=1e9, down=1e9)
    wide = exchange_of(23.6, 0.2, remotes=3, coordinator=fast)
    assert exposed_seconds(wide, "fp32").value == pytest.approx(one)


def test_workers_beside_the_coordinator_cost_nothing() -> None:
    choice = choose_exchange(exchange_of(1.25, 0.2, remotes=0))
    assert (choice.codec, choice.every, choice.taken.exposed_ms) == ("fp32", 1, 0)


def test_an_uplink_that_is_slower_than_the_downlink() -> None:
    slow = LinkRates(up=1.25e6, down=25e6)
    asked = replace(exchange_of(118, 1.0), link=slow)
    assert exposed_seconds(asked, "fp32").value == pytest.approx(23.6 / 1.25 - 0.5)
    shared = replace(asked, link=replace(slow, half_duplex=True))
    assert exposed_seconds(shared, "fp32").value == pytest.approx(23.6 / 1.25 + 23.6 / 25 - 0.5)


def test_the_round_trip_is_paid_in_each_step_and_once_a_round() -> None:
    far = replace(exchange_of(118, 1.0), link=LinkRates(up=118e6, down=118e6, round_trip=0.2))
    assert exposed_seconds(far, "bf16").value == pytest.approx(0.2 + 0.0056, abs=1e-4)
    choice = choose_exchange(far)
    assert (choice.codec, choice.every) == (ROUNDS_CODEC, 5)


def test_only_the_last_micro_batch_hides() -> None:
    four = exposed_seconds(exchange_of(23.6, 1.0, microbatches=4), "fp32").value
    assert four == pytest.approx(1.0 - 0.125)


def test_bytes_are_those_that_the_codecs_need() -> None:
    size = 16 * 65_536
    for name in CODECS:
        found = make_codec(name).encoded_size(size) / size
        assert found == pytest.approx(element_bytes(name), rel=2e-3), name


def test_the_size_of_an_unknown_codec_is_refused() -> None:
    with pytest.raises(InputError, match="codec int3: unknown; use one of auto, fp32"):
        element_bytes("int3")


def test_impossible_figures_are_refused() -> None:
    links = ({"up": 0.0}, {"down": -1.0}, {"round_trip": -0.1}, {"up": float("nan")})
    for wrong in links:
        figures: dict[str, Any] = {"up": 1.0, "down": 1.0, **wrong}
        with pytest.raises(InputError, match="a link needs positive rates"):
            LinkRates(**figures)
    sizes: list[dict[str, Any]] = [
        {"elements": 0},
        {"step_seconds": 0.0},
        {"total_steps": 0},
        {"remotes": -1},
    ]
    for wrong in sizes:
        with pytest.raises(InputError, match="must be positive"):
            exchange_of(118, 1.0, **wrong)
