"""What hosts cost as time passes: rent, energy as planned, energy as measured."""

from __future__ import annotations

import pytest

from trainer.config.budget import HostRate
from trainer.planning.budget.accrual import Accrual, HostSpend
from trainer.planning.cluster_text import parse_cluster
from trainer.planning.cost import Prices, host_cost, hosts_cost, money_text, plan_cost

RENTED = HostRate(name="rack", price_hour=2.4)
OWN = HostRate(name="home", watts=500, price_kwh=0.30)


def test_rent_and_energy_of_an_hour() -> None:
    assert host_cost(RENTED, 3600).money == 2.4
    own = host_cost(OWN, 3600)
    assert own.kwh == pytest.approx(0.5)
    assert own.money == pytest.approx(0.15)
    both = hosts_cost([RENTED, OWN], 1800)
    assert both.money == pytest.approx(1.275)
    assert both.kwh is None, "nobody knows what the rented one draws"


def test_a_plan_with_prices_of_hosts_counts_those() -> None:
    prices = Prices(hosts=(RENTED, OWN), currency="EUR")
    cost = plan_cost(parse_cluster("2xRTX4090"), 7200, prices)
    assert cost.money == pytest.approx(2 * 2.4 + 0.30)


def test_time_is_counted_once_and_never_backwards() -> None:
    accrual = Accrual([RENTED, OWN], now=100.0)
    for now in (100.0, 460.0, 400.0, 1900.0):
        accrual.advance(now, {})
    assert accrual.money == pytest.approx(hosts_cost([RENTED, OWN], 1800).money)
    assert accrual.an_hour == pytest.approx(2.55)


def test_measured_power_takes_the_place_of_the_planned() -> None:
    accrual = Accrual([OWN], now=0.0)
    accrual.advance(1800.0, {"home": 200.0})
    assert accrual.kwh == pytest.approx(0.1)
    assert accrual.an_hour == pytest.approx(0.2 * 0.30), "projected with the present power"
    accrual.advance(3600.0, {})
    (part,) = accrual.take_spend()
    assert (part.seconds, part.measured) == (3600.0, 1800.0)
    assert part.kwh == pytest.approx(0.1 + 0.25)
    assert accrual.take_spend() == [HostSpend("home")], "and each second is taken once"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0.0, "0.00"),
        (0.004, "0.0040"),
        (0.05, "0.050"),
        (0.43, "0.43"),
        (1234.5, "1234.50"),
        (1e-30, "0.000000000"),
    ],
)
def test_a_small_amount_is_not_nothing(amount: float, text: str) -> None:
    assert money_text(amount) == text
