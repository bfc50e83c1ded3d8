"""What hosts cost, which of them are rented, and the budget that a run's config gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from launcher.errors import ConfigError, OverBudgetError
from launcher.inventory.facts.devices import Device
from launcher.inventory.hosts import Host
from launcher.plan.budget import list_host_rates, refuse_unknown_rents, why_rented, with_budget
from launcher.plan.distillation import place_distillation
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from tests.launcher.plan.places import SETTING
from trainer.config import distill_job
from trainer.config.run import RunConfig, load_config

CARD = Device("cuda", "GPU-1", "NVIDIA GeForce RTX 4090", 24 << 30)
RACK = Host(name="rack", devices=(CARD, replace(CARD, id="GPU-2")), price_hour=2.4, currency="USD")
HOME = Host(
    name="home",
    connection="local",
    coordinator=True,
    bind_address="10.0.0.1",
    devices=(Device("cpu", "cpu", threads=2),),
    watts=500.0,
    price_kwh=0.3,
    currency="USD",
)


def plan_of(*hosts: Host) -> LaunchPlan:
    return place_run(hosts, load_config("quickstart"), None, SETTING)


def settled(config: RunConfig, *hosts: Host, **environment: str) -> tuple[RunConfig, list[str]]:
    return with_budget(config, plan_of(*hosts), {}, environment)


@pytest.mark.parametrize(
    ("host", "rented"),
    [
        (Host(name="a"), False),
        (Host(name="a", watts=500, price_kwh=0.3, currency="EUR"), False),
        (Host(name="a", price_hour=0.0, currency="EUR"), True),
        (Host(name="a", provider="Amazon"), True),
        (Host(name="a", rented=True), True),
        (Host(name="a", rented=False, provider="Amazon"), False),
    ],
)
def test_how_a_host_is_known_to_be_rented(host: Host, rented: bool) -> None:
    assert bool(why_rented(host)) == rented


def test_a_rented_host_without_a_price_is_refused() -> None:
    refuse_unknown_rents([RACK, HOME, Host(name="gift", provider="Amazon", price_hour=0.0)])
    for host, why in (
        (Host(name="a", rented=True), "motley_rented is true"),
        (Host(name="a", provider="Hetzner"), "its firmware says Hetzner"),
        (Host(name="a", rented=True, watts=5, price_kwh=1), "motley_rented is true"),
    ):
        with pytest.raises(OverBudgetError, match=why) as found:
            refuse_unknown_rents([RACK, host])
        assert "host a is rented" in str(found.value)
        assert found.value.exit_code == 7


def test_a_run_gets_the_prices_of_its_hosts_the_coordinators_first() -> None:
    config, remarks = settled(load_config("quickstart", {"budget.idle_stop": "30m"}), RACK, HOME)
    budget = config.budget
    assert budget is not None
    assert remarks == []
    assert (budget.currency, budget.idle_stop, budget.ceiling) == ("USD", 1800.0, None)
    assert budget.ledger == "/state/spend.jsonl"
    home, rack = budget.hosts
    assert (home.name, home.watts, home.price_kwh, home.ranks) == ("home", 500.0, 0.3, (2,))
    assert (rack.name, rack.price_hour, rack.ranks) == ("rack", 2.4, (0, 1))
    assert rack.watts == 900.0, "of two cards in the table of known devices"


def test_a_run_on_hosts_without_prices_is_unchanged() -> None:
    plain = replace(HOME, watts=None, price_kwh=None, currency=None)
    assert settled(load_config("quickstart"), plain)[0] == load_config("quickstart")


def test_a_ceiling_of_the_environment() -> None:
    given = {"MOTLEY_BUDGET_CEILING": "5", "MOTLEY_BUDGET_CURRENCY": "USD"}
    budget = settled(load_config("quickstart"), HOME, **given)[0].budget
    assert budget is not None
    assert budget.ceiling == 5.0


def test_two_currencies() -> None:
    euros = load_config("quickstart", {"budget": {"ceiling": 5, "currency": "EUR"}})
    with pytest.raises(ConfigError, match="two currencies: the budget has EUR, host home has USD"):
        settled(euros, HOME)
    with pytest.raises(ConfigError, match="two currencies: host home has USD, host rack has EUR"):
        settled(load_config("quickstart"), HOME, replace(RACK, currency="EUR"))


def test_owned_hosts_that_add_nothing_are_named() -> None:
    dollars = load_config("quickstart", {"budget": {"ceiling": 5, "currency": "USD"}})
    plain = replace(RACK, price_hour=None, currency=None)
    _, remarks = settled(dollars, HOME, plain)
    assert remarks == [
        "host rack: it has neither a rent nor a price of energy, so it adds nothing to the ceiling"
    ]
    _, remarks = settled(dollars, replace(HOME, watts=None), RACK)
    assert "home: its power is unknown until it is measured (motley_watts)" in remarks[0]


def test_two_names_of_one_machine_are_billed_once() -> None:
    twin = replace(RACK, name="rack-again")
    ranks, machines = {"rack": [0], "rack-again": [1]}, {"rack": "same", "rack-again": "same"}
    (rate,) = list_host_rates([RACK, twin], ranks, machines)
    assert (rate.name, rate.price_hour, rate.ranks) == ("rack", 2.4, (0, 1))


def test_a_distillation_gets_the_prices_of_all_its_hosts_the_students_first() -> None:
    rack, home = replace(RACK, share_folder="/share"), replace(HOME, share_folder="/share")
    job = distill_job.load_job(
        None,
        {
            "teacher.model": "t",
            "teacher.data": ["c"],
            "student.model": "s",
            "evaluation.data": ["e"],
            "budget.ceiling": 5,
            "budget.currency": "USD",
        },
    )
    plan = place_distillation([home, rack], job, SETTING)
    made, remarks = with_budget(job, plan, {}, {})
    assert made.budget is not None
    assert remarks == []
    assert [host.name for host in made.budget.hosts] == ["rack", "home"]
    assert made.budget.ledger == "/var/lib/motley/spend.jsonl"
    assert distill_job.DistillJob.model_validate(yaml.safe_load(made.to_yaml())) == made
