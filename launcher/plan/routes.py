"""Choose the coordinator's address for the workers, by routes. Pure: contacts no machine.

Every address of that host is a candidate, and every other host has reported its route to each. The
best one is on a network common to all, without a router or a VPN between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError
from launcher.inventory.facts.network import Address, Network, Route
from launcher.inventory.hosts import Host

_DIRECT, _TUNNEL, _ROUTED = range(3)


@dataclass(frozen=True)
class Choice:
    """The address to bind, and by host its own address on that route."""

    bind: str
    sources: Mapping[str, str]


def choose_address(
    head: Host, network: Network, answers: Mapping[str, Mapping[str, Route]]
) -> Choice:
    """Return the address of the coordinator's host that every other host can reach.

    Of several on a common network: the one that the inventory names as `ansible_host`, then the
    first, IPv4 before IPv6. The choice does not depend on the order in which hosts answered.

    Args:
        answers: by host on another machine that trains, its routes to each address of `network`.

    Raises:
        ConfigError: there is no such address; the message names the hosts without a route.
    """
    if network.problem:
        raise ConfigError(
            f"host {head.name}: its addresses cannot be read: {network.problem}; "
            "set motley_bind_address"
        )
    ranked = [
        (cost, _rank_entry(entry, head, position), entry.address)
        for position, entry in enumerate(network.addresses)
        if (cost := _worst_route(entry, answers)) is not None
    ]
    if not ranked:
        raise ConfigError(_no_way(head, network.addresses, answers))
    bind = min(ranked)[2]
    sources = {name: routes[bind].source for name, routes in answers.items()}
    return Choice(bind, {head.name: bind, **{n: s for n, s in sources.items() if s}})


def _worst_route(entry: Address, answers: Mapping[str, Mapping[str, Route]]) -> int | None:
    """Return the worst route of the hosts to this address; None if one has no route at all."""
    worst = _TUNNEL if entry.tunnel else _DIRECT
    for routes in answers.values():
        route = routes.get(entry.address)
        # A route to itself: that host has the same address, so it would connect to itself.
        if route is None or route.problem or route.own:
            return None
        worst = max(worst, _ROUTED if route.gateway else _TUNNEL if route.tunnel else _DIRECT)
    return worst


def _rank_entry(entry: Address, head: Host, position: int) -> tuple[bool, bool, int]:
    return entry.address != head.address, ":" in entry.address, position


def _no_way(
    head: Host, addresses: Sequence[Address], answers: Mapping[str, Mapping[str, Route]]
) -> str:
    lost = [
        name
        for name, routes in answers.items()
        if not any(route.source and not route.own for route in routes.values())
    ]
    tried = ", ".join(entry.address for entry in addresses) or "none that others could reach"
    return (
        f"host {head.name}: no address of it ({tried}) has a route from all of "
        f"{', '.join(lost or sorted(answers))}; set motley_bind_address there, or "
        "motley_connect_address on the hosts behind another network"
    )
