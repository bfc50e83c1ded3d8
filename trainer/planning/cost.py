"""Energy and money of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.budget import HostRate
from trainer.planning.devices import ClusterShape

JOULES_OF_KWH = 3.6e6


def money_text(amount: float) -> str:
    """Return an amount for people: two decimals, or as many as show two of its digits."""
    digits = 2 if amount == 0 or amount >= 0.1 else min(9, 1 - math.floor(math.log10(amount)))
    return f"{amount:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The user's prices; None: not given."""

    kwh: float | None = None
    hour: float | None = None
    """Price of one device."""
    currency: str = ""
    hosts: tuple[HostRate, ...] = ()
    """Rates of whole hosts, in place of `kwh` and `hour`."""


NO_PRICES = Prices()


@dataclass(frozen=True)
class Cost:
    """The energy and money of a whole run."""

    seconds: float
    kwh: float | None
    """None: the power of a device is unknown."""
    money: float | None
    """None: no price is given."""


def plan_cost(cluster: ClusterShape, seconds: float, prices: Prices) -> Cost:
    """Return the cost of all devices at their most power; other parts of a host are not counted.

    `kWh = watts x hours / 1000`; money is energy and rent together, where their prices are given.
    With prices of whole hosts it is their sum.
    """
    if prices.hosts:
        return hosts_cost(prices.hosts, seconds)
    watts = 0.0
    unknown = False
    for group in cluster.groups:
        unknown |= group.device.watts is None
        watts += group.hosts * group.devices * (group.device.watts or 0)
    hours = seconds / 3600
    kwh = None if unknown else watts * hours / 1000
    money = None
    if prices.hour is not None:
        money = prices.hour * cluster.world * hours
    if prices.kwh is not None and kwh is not None:
        money = (money or 0) + prices.kwh * kwh
    return Cost(seconds, kwh, money)


def host_cost(rate: HostRate, seconds: float, watts: float | None = None) -> Cost:
    """Return what a host costs for a time, at its measured power, else at `rate.watts`."""
    watts = rate.watts if watts is None else watts
    kwh = None if watts is None else watts * seconds / JOULES_OF_KWH
    money = None
    if rate.price_hour is not None:
        money = rate.price_hour * seconds / 3600
    if rate.price_kwh is not None and kwh is not None:
        money = (money or 0) + rate.price_kwh * kwh
    return Cost(seconds, kwh, money)


def hosts_cost(rates: Sequence[HostRate], seconds: float) -> Cost:
    """Return what hosts cost for a time; one whose price is unknown adds nothing."""
    costs = [host_cost(rate, seconds) for rate in rates]
    kwh = [cost.kwh for cost in costs if cost.kwh is not None]
    money = [cost.money for cost in costs if cost.money is not None]
    return Cost(
        seconds, sum(kwh) if len(kwh) == len(costs) else None, sum(money) if money else None
    )
