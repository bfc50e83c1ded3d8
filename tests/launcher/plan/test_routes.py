"""The coordinator's address by route, over tables of nasty networks. Pure: no machine is asked."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest

from launcher.errors import ConfigError
from launcher.inventory.facts.network import Address, Network, Route
from launcher.inventory.hosts import Host
from launcher.plan.routes import choose_address

HEAD = Host(name="intel", address="192.168.1.2", coordinator=True)


def having(*addresses: str) -> Network:
    """Make a network of `ADDRESS/PREFIX` texts; those of 10.8. and 100.64. are a VPN's."""
    parsed = [ipaddress.ip_interface(text) for text in addresses]
    return Network(
        tuple(
            Address(str(i.ip), i.network.prefixlen, f"e{n}", 1500, is_vpn(str(i.ip)))
            for n, i in enumerate(parsed)
        )
    )


def is_vpn(address: str) -> bool:
    return address.startswith(("10.8.", "100.64."))


def worker(own: Sequence[str], targets: Network, default: str = "gateway") -> dict[str, Route]:
    """Answer as a Linux host with these addresses; `default` is a gateway, a tunnel, or none."""
    interfaces = [ipaddress.ip_interface(text) for text in own]
    found: dict[str, Route] = {}
    for entry in targets.addresses:
        target = ipaddress.ip_address(entry.address)
        near = [i for i in interfaces if target in i.network]
        away = [i for i in interfaces if i.version == target.version]
        if any(i.ip == target for i in interfaces):
            found[entry.address] = Route(source=str(target), interface="lo", own=True)
        elif near:
            source = str(near[0].ip)
            found[entry.address] = Route(source=source, interface="e0", tunnel=is_vpn(source))
        elif away and default != "none":
            source = str(away[0].ip)
            through = default == "gateway"
            found[entry.address] = Route(source, "e0", gateway=through, tunnel=not through)
        else:
            found[entry.address] = Route(problem="Network is unreachable")
    return found


def bind(
    head: Sequence[str], workers: Mapping[str, Sequence[str]], default: str = "gateway"
) -> str:
    network = having(*head)
    answers = {name: worker(own, network, default) for name, own in workers.items()}
    return choose_address(HEAD, network, answers).bind


TABLE: dict[str, tuple[list[str], dict[str, list[str]], str, str]] = {
    "one network": (["192.168.1.2/24"], {"a": ["192.168.1.3/24"]}, "gateway", "192.168.1.2"),
    "two cards, one shared": (
        ["192.168.7.2/24", "10.0.0.2/24"],
        {"a": ["10.0.0.3/24"], "b": ["10.0.0.4/24"]},
        "gateway",
        "10.0.0.2",
    ),
    "two cards, both shared: the one that the inventory names": (
        ["10.0.0.2/24", "192.168.1.2/24"],
        {"a": ["10.0.0.3/24", "192.168.1.3/24"]},
        "gateway",
        "192.168.1.2",
    ),
    "a cable to one worker, a switch to both": (
        ["10.0.0.2/30", "192.168.5.2/24"],
        {"a": ["10.0.0.1/30", "192.168.5.3/24"], "b": ["192.168.5.4/24"]},
        "gateway",
        "192.168.5.2",
    ),
    "the worker's default route is a VPN": (
        ["192.168.1.2/24", "10.8.0.6/24"],
        {"a": ["192.168.1.3/24", "10.8.0.7/24"]},
        "tunnel",
        "192.168.1.2",
    ),
    "at home in different places, a VPN between": (
        ["192.168.1.2/24", "100.64.0.2/10"],
        {"a": ["192.168.178.3/24", "100.64.0.3/10"]},
        "gateway",
        "100.64.0.2",
    ),
    "only through a router": (["10.1.0.2/24"], {"a": ["10.2.0.3/24"]}, "gateway", "10.1.0.2"),
    "IPv6 alone": (["fd00::2/64"], {"a": ["fd00::3/64"]}, "none", "fd00::2"),
    "IPv4 before IPv6": (
        ["fd00::2/64", "10.0.0.2/24"],
        {"a": ["fd00::3/64", "10.0.0.3/24"]},
        "gateway",
        "10.0.0.2",
    ),
    "IPv6 is all they share": (
        ["192.168.9.2/24", "fd00::2/64"],
        {"a": ["fd00::3/64"], "b": ["fd00::4/64", "192.168.9.4/24"]},
        "none",
        "fd00::2",
    ),
    "both have the same address on a bridge of their own": (
        ["10.5.5.1/24", "192.168.1.2/24"],
        {"a": ["10.5.5.1/24", "192.168.1.3/24"]},
        "gateway",
        "192.168.1.2",
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_the_common_network_is_found(case: str) -> None:
    head, workers, default, expected = TABLE[case]
    for order in permutations(workers):
        assert bind(head, {name: workers[name] for name in order}, default) == expected


def test_every_hosts_own_address_on_the_way_is_known() -> None:
    network = having("192.168.1.2/24")
    answers = {"a": worker(["10.9.9.9/24", "192.168.1.3/24"], network)}
    assert choose_address(HEAD, network, answers).sources == {
        "intel": "192.168.1.2",
        "a": "192.168.1.3",
    }


def test_no_way_names_the_host_that_has_none() -> None:
    with pytest.raises(ConfigError) as error:
        bind(["10.0.0.2/24"], {"a": ["10.0.0.3/24"], "b": ["192.168.1.3/24"]}, "none")
    assert "host intel: no address of it (10.0.0.2) has a route from all of b;" in str(error.value)
    assert "motley_bind_address" in str(error.value)


def test_addresses_that_cannot_be_read_are_the_reason() -> None:
    with pytest.raises(ConfigError, match="iproute2"):
        choose_address(HEAD, Network(problem="`ip` is missing (apt install iproute2)"), {})
