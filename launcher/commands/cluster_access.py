"""The hosts of an inventory and the runs that they record."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_hosts(inventory: Path | None, limit: str, extra_vars: tuple[str, ...]) -> Any:
    """Return the `Host`s that `inventory_options` describe.

    Raises:
        ConfigError: the inventory or a variable cannot be used.
    """
    from launcher.inventory.hosts import load_inventory
    from launcher.plan.configuration import parse_assignments
    from launcher.views.render import working

    with working("reading the inventory"):
        return load_inventory(inventory, limit=limit, extra=parse_assignments(extra_vars, "-e"))


def open_registry(inventory: Path | None, to_look: bool = True) -> Any:
    """Return the `Registry` of the inventory's cluster, or of this machine; warns if it is partial.

    A read-only command needs no Ansible while the inventory is unchanged, and does not wait for
    hosts that are slow to answer.

    Raises:
        ConfigError: the inventory cannot be used.
        UnreachableError: none of its hosts answers.
    """
    from launcher.hosts.fleet import LOOK, REACH
    from launcher.inventory.cache import recall_hosts
    from launcher.runs.registry import Registry
    from launcher.views.render import note

    if inventory is None:
        return Registry.default()
    hosts = recall_hosts(inventory) if to_look else read_hosts(inventory, "all", ())
    registry = Registry.of(hosts, LOOK if to_look else REACH)
    if registry.absence is not None:
        note(f"{registry.absence}; what the other hosts know:")
    return registry
