"""The accumulated cost of a run. Pure: callers pass the time, and no clock is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config.budget import HostRate
from trainer.planning.cost import host_cost


@dataclass
class HostSpend:
    """The cost of one host so far; sums never decrease."""

    host: str
    seconds: float = 0.0
    kwh: float = 0.0
    money: float = 0.0
    measured: float = 0.0
    """Seconds whose power was measured; that of the others is planned."""

    def add_spend(self, other: HostSpend) -> None:
        """Count another part of the same host."""
        self.seconds += other.seconds
        self.kwh += other.kwh
        self.money += other.money
        self.measured += other.measured


class Accrual:
    """The cost of hosts from `now` on; times are monotonic seconds."""

    def __init__(self, rates: Sequence[HostRate], now: float) -> None:
        self.rates = tuple(rates)
        self.money = 0.0
        self.kwh = 0.0
        self._now = now
        self._watts: Mapping[str, float] = {}
        self._open = {rate.name: HostSpend(rate.name) for rate in rates}

    def advance(self, now: float, watts: Mapping[str, float]) -> None:
        """Count the time since the last call.

        Args:
            watts: the measured power of hosts in that time; of the others it is planned.
        """
        seconds, self._now, self._watts = max(0.0, now - self._now), max(now, self._now), watts
        for rate in self.rates:
            cost = host_cost(rate, seconds, watts.get(rate.name))
            part = HostSpend(
                rate.name,
                seconds,
                cost.kwh or 0.0,
                cost.money or 0.0,
                seconds if rate.name in watts else 0.0,
            )
            self._open[rate.name].add_spend(part)
            self.money += part.money
            self.kwh += part.kwh

    @property
    def an_hour(self) -> float:
        """Money that an hour costs at the present power."""
        costs = (host_cost(rate, 3600.0, self._watts.get(rate.name)) for rate in self.rates)
        return sum(cost.money or 0.0 for cost in costs)

    def take_spend(self) -> list[HostSpend]:
        """Return what was counted since the last call, of every host."""
        taken = list(self._open.values())
        self._open = {rate.name: HostSpend(rate.name) for rate in self.rates}
        return taken

    def put_back(self, parts: Sequence[HostSpend]) -> None:
        """Count parts again that could not be recorded."""
        for part in parts:
            self._open[part.host].add_spend(part)
