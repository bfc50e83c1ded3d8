"""The budget of a run on the hosts of an inventory. Pure: contacts no machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar

from launcher.errors import ConfigError, OverBudgetError
from launcher.inventory.hosts import Host
from launcher.plan.plan import LaunchPlan
from trainer.config.budget import BudgetConfig, HostRate, apply_environment
from trainer.config.distill_job import DistillJob
from trainer.config.run import RunConfig
from trainer.planning.budget.ledger import SPEND_FILE
from trainer.planning.device_models import find_device
from trainer.system.errors import InputError

JobT = TypeVar("JobT", bound=RunConfig | DistillJob)


def why_rented(host: Host) -> str:
    """Return how a host is known to be rented; empty if it is not.

    The inventory's word holds. Without it, a host is rented if it has a rent, or if its firmware
    names a cloud.
    """
    if host.rented is not None:
        return "motley_rented is true" if host.rented else ""
    if host.price_hour is not None:
        return "it has motley_price_hour"
    return f"its firmware says {host.provider}" if host.provider else ""


def refuse_unknown_rents(hosts: Sequence[Host]) -> None:
    """Check that every rented host has a price.

    Raises:
        OverBudgetError: a rented host has no price.
    """
    for host in hosts:
        if (why := why_rented(host)) and host.price_hour is None:
            raise OverBudgetError(
                f"host {host.name} is rented ({why}), and its price is unknown: set"
                " motley_price_hour and motley_currency in the inventory, or motley_rented: false"
            )


def find_currency(hosts: Sequence[Host], own: str | None) -> str | None:
    """Return the one currency of prices and budget; None without any.

    Raises:
        ConfigError: there are two.
    """
    currencies = {"the budget": own} | {f"host {h.name}": h.currency for h in hosts}
    found = {who: currency for who, currency in currencies.items() if currency is not None}
    for who, currency in found.items():
        first = next(iter(found))
        if currency != found[first]:
            raise ConfigError(
                f"two currencies: {first} has {found[first]}, {who} has {currency}; give all"
                " prices and the ceiling in one"
            )
    return next(iter(found.values()), None)


def list_host_rates(
    hosts: Sequence[Host],
    ranks: Mapping[str, Sequence[int]],
    identities: Mapping[str, str] | None = None,
) -> tuple[HostRate, ...]:
    """Return what hosts cost; two names of one machine are billed as its first.

    Args:
        ranks: the workers of hosts, by name.
        identities: ids of machines by host name, equal for two names of one.
    """
    found: dict[str, HostRate] = {}
    for host in hosts:
        machine = (identities or {}).get(host.name, host.name)
        own = tuple(ranks.get(host.name, ()))
        if machine in found:
            first = found[machine]
            found[machine] = first.model_copy(update={"ranks": (*first.ranks, *own)})
            continue
        found[machine] = HostRate(
            name=host.name,
            price_hour=host.price_hour,
            watts=host.watts or _known_watts(host),
            price_kwh=host.price_kwh,
            ranks=own,
        )
    return tuple(found.values())


def _known_watts(host: Host) -> float | None:
    """Return the most power of a host's devices; None unless all of them are known."""
    total = 0.0
    for device in host.devices or ():
        try:
            watts = find_device(device.name, device.memory).watts
        except InputError:
            return None
        if watts is None:
            return None
        total += watts
    return total or None


def with_budget(
    config: JobT, plan: LaunchPlan, identities: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[JobT, list[str]]:
    """Return the config with what its hosts cost, and remarks; unchanged if nothing is priced.

    Raises:
        ConfigError: there are two currencies.
    """
    budget = apply_environment(config.budget, environment)
    hosts = sorted(plan.hosts, key=lambda host: host.name != plan.leader.host)
    currency = find_currency(hosts, None if budget is None else budget.currency)
    priced = [host for host in hosts if host.currency is not None or host.watts is not None]
    if budget is None and not priced:
        return config, []
    ranks: dict[str, list[int]] = {}
    for worker in plan.workers:
        if worker.rank is not None:
            ranks.setdefault(worker.host, []).append(worker.rank)
    rates = list_host_rates(hosts, ranks, identities)
    own = (budget or BudgetConfig()).model_dump()
    ledger = PurePosixPath(plan.leader.state_folder) / SPEND_FILE
    own |= {"currency": currency, "hosts": [r.model_dump() for r in rates], "ledger": str(ledger)}
    validated = BudgetConfig.model_validate(own)
    remarks = [
        f"host {rate.name}: {_explain_missing_rate(rate)}, so it adds nothing to the ceiling"
        for rate in rates
        if validated.ceiling is not None and _explain_missing_rate(rate)
    ]
    return config.model_copy(update={"budget": validated}), remarks


def _explain_missing_rate(rate: HostRate) -> str:
    """Return why a host costs nothing as planned; empty if it does not."""
    if not rate.is_priced:
        return "it has neither a rent nor a price of energy"
    if rate.price_hour is None and rate.watts is None:
        return "its power is unknown until it is measured (motley_watts)"
    return ""
