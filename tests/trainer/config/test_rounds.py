"""The settings of rounds: what is agreed on, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.capabilities import check_capability
from trainer.config.run import RunConfig, load_config
from trainer.exchange.protocol.schedule import StepPlan
from trainer.system.errors import InputError


def rounds(**settings: object) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config("quickstart", {"exchange.schedule": "rounds", **keys})


def test_members_agree_on_rounds_and_on_which_are_settled():
    config = rounds()
    assert config.agreement_digest() != load_config("quickstart").agreement_digest()
    for settings in (
        {"exchange__inner_steps": 21},
        {"exchange__rounds_after": 1},
        {"exchange__outer_learning_rate": 0.6},
        {"exchange__outer_momentum": 0.5},
        {"exchange__flush_every": 3},
        {"checkpoint__every": 3},
        {"training__evaluate_every": 3},
    ):
        assert rounds(**settings).agreement_digest() != config.agreement_digest(), settings
    other = rounds(exchange__flush_every=3)
    (change,) = config.list_changes(other)
    assert change == "exchange.rounds.flush_every: [140] -> [3, 140]"


def test_without_rounds_their_settings_are_not_compared():
    plain, other = load_config("quickstart"), load_config("quickstart", {"checkpoint.every": 9})
    assert other.agreement_digest() == plain.agreement_digest()


def test_rounds_are_settled_wherever_a_run_is_saved():
    config = rounds(exchange__flush_every=7, checkpoint__every=10, training__evaluate_every=0)
    assert config.exchange.flush_intervals(*config.save_intervals) == (7, 10)


@pytest.mark.parametrize(
    ("total", "remedy"),
    [(399, "give at most 19, or leave exchange.schedule"), (19, "; leave exchange.schedule")],
)
def test_a_run_of_too_few_rounds_is_refused(total: int, remedy: str):
    exchange = rounds().exchange
    with pytest.raises(InputError) as refused:
        exchange.check_length(total)
    assert f"20 of the run's {total} steps leave fewer than 20 rounds" in str(refused.value)
    assert remedy in str(refused.value)
    exchange.check_length(400)
    load_config("quickstart").exchange.check_length(1)


def test_published_rounds_of_500_steps_need_a_run_of_10000():
    exchange = rounds(exchange__inner_steps=500).exchange
    exchange.check_length(10_000)
    plan = StepPlan(32 * 10_000, 32, 1, 10_000, 500, ())
    assert plan.total_steps == 20
    assert len(range(plan.find_samples(7).start, plan.find_samples(7).stop)) == 500 * 32
    with pytest.raises(InputError, match=r"500 of the run's 9999 steps .*give at most 499"):
        exchange.check_length(9_999)


def test_what_rounds_do_not_go_with():
    with pytest.raises(InputError, match="--distributed has no rounds"):
        check_capability(rounds(), "ranks")
    check_capability(load_config("quickstart"), "ranks")


def test_rounds_that_would_never_begin_are_refused():
    exchange = rounds(exchange__rounds_after=400).exchange
    with pytest.raises(InputError, match="no round would begin after 400"):
        exchange.check_length(400)
    exchange.check_length(401)


def test_what_has_no_coordinator_has_no_rounds():
    with pytest.raises(InputError, match="a student on its own has no rounds"):
        check_capability(rounds(), "student")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codec", "int8"),
        ("split", "equal"),
        ("alarm_factor", 3.0),
        ("outliers", "halt"),
        ("shared_memory", False),
        ("step_deadline", 9.0),
    ],
)
def test_what_ranks_without_a_coordinator_cannot_follow_is_refused(name: str, value: Any) -> None:
    config = load_config("quickstart", {f"exchange.{name}": value})
    with pytest.raises(InputError, match=rf"exchange\.{name} {value}: needs a coordinator"):
        check_capability(config, "ranks")


def test_what_ranks_follow_is_taken() -> None:
    given = {"hash_every": 3, "join_deadline": 7.0, "topology": "ring"}
    settings = {f"exchange.{name}": value for name, value in given.items()}
    check_capability(load_config("quickstart", settings), "ranks")
