"""The spending of a cluster's runs, and the current cost of its idle hosts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launcher.errors import ConfigError
from launcher.hosts.fleet import Answers, describe_pending
from launcher.inventory.hosts import Host
from launcher.plan.budget import list_host_rates
from launcher.runs.records.registry import Registry
from launcher.runs.records.run import StateFolder
from launcher.runs.status import OVER, RunView
from trainer.planning.budget.ledger import SPEND_FILE, SpendRecord, parse_spend
from trainer.planning.cost import host_cost
from trainer.system.errors import plain_reason

By = Literal["run", "host", "day"]
MOST_SPEND = 1 << 28
"""Bytes of a spend.jsonl that are read."""


@dataclass(frozen=True)
class SpendTotal:
    """The spending under one name, in one currency."""

    name: str
    seconds: float
    """Sum over all hosts."""
    kwh: float
    measured_fraction: float
    """Share of the seconds whose power was measured, 0 to 1; of the others it is planned."""
    cost: float
    currency: str | None


@dataclass(frozen=True)
class IdleHost:
    """A host with a price and without a process of a run."""

    name: str
    hourly_cost: float
    """Its rent, and its energy under load."""
    idle_cost: float | None
    """Its cost since the last run ended; None: no run has ended."""
    currency: str | None


def read_spend(
    registry: Registry, report: Callable[[str], None], *, waits: bool = False
) -> list[SpendRecord]:
    """Return every line of the hosts' ledgers by time; hosts that do not answer are reported.

    Args:
        waits: for hosts whose logins take long; else those that answer at once count.

    Raises:
        ConfigError: a ledger is damaged; names host, file and line.
    """

    def read(place: StateFolder) -> list[SpendRecord]:
        path = str(place.folder / SPEND_FILE)
        try:
            data = place.connection.read(path, limit=MOST_SPEND)
            return parse_spend(data, f"{place.host}: {path}" if place.host else path)
        except FileNotFoundError:
            return []

    def on_late(answers: Answers[list[SpendRecord]]) -> None:
        report(describe_pending(answers.late))

    answers = registry.ask_hosts(read, on_late=on_late if waits else None)
    for name, error in answers.errors.items():
        if isinstance(error, ConfigError):
            raise error
        report(f"host {name}: {plain_reason(error)}; its records are missing from this list")
    # Two names of one machine have one ledger.
    found = {
        (r.run_id, r.host, r.until, r.seconds): r for each in answers.found.values() for r in each
    }
    return sorted(found.values(), key=lambda record: record.until)


def sum_spend(records: Sequence[SpendRecord], by: By) -> list[SpendTotal]:
    """Return sums by run, host or day (UTC), in the order of their first lines."""
    groups: dict[tuple[str, str | None], list[SpendRecord]] = {}
    for record in records:
        groups.setdefault((_group_key(record, by), record.currency), []).append(record)
    found: list[SpendTotal] = []
    for (name, currency), parts in groups.items():
        seconds = sum(part.seconds for part in parts)
        measured = sum(part.measured_seconds for part in parts)
        found.append(
            SpendTotal(
                name,
                seconds,
                sum(part.kwh for part in parts),
                measured / seconds if seconds else 0.0,
                sum(part.cost for part in parts),
                currency,
            )
        )
    return found


def _group_key(record: SpendRecord, by: By) -> str:
    if by == "day":
        return datetime.datetime.fromtimestamp(record.until, datetime.UTC).date().isoformat()
    return record.run_id if by == "run" else record.host


def idle_hosts(hosts: Sequence[Host], view: RunView | None, now: float) -> list[IdleHost]:
    """Return the priced hosts of an inventory on which no process of a run is left.

    Args:
        view: the run that is up, or the latest; None: there was none.
        now: Unix seconds.
    """
    busy: set[str] = set()
    ended: Any = None
    if view is not None:
        states = view.processes
        busy = {p.host for p in view.run.plan.processes if not states[p.name].is_over}
        ended = (view.training or {}).get("updated") if view.state in OVER else None
    found: list[IdleHost] = []
    for host in hosts:
        if host.name in busy or (host.price_hour is None and host.price_kwh is None):
            continue
        (rate,) = list_host_rates([host], {})
        an_hour = host_cost(rate, 3600.0).money or 0.0
        since = an_hour * max(0.0, now - ended) / 3600 if ended is not None else None
        if an_hour:
            found.append(IdleHost(host.name, an_hour, since, host.currency))
    return found
