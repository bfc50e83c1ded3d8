"""Energy and money of a run."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.devices import Cluster


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What a user pays; None: not given."""

    kwh: float | None = None
    hour: float | None = None
    """Of one device."""
    currency: str = ""


NO_PRICES = Prices()


@dataclass(frozen=True)
class Cost:
    """Of a whole run."""

    seconds: float
    kwh: float | None
    """None: the power of a device is unknown."""
    money: float | None
    """None: no price is given."""


def plan_cost(cluster: Cluster, seconds: float, prices: Prices) -> Cost:
    """Return the cost of all devices at their most power; other parts of a host are not counted.

    `kWh = watts x hours / 1000`; money is energy and rent together, where their prices are given.
    """
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
