"""Addresses and routes over recorded outputs of `ip`: what only this machine can reach is left."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.inventory.facts.network import (
    Network,
    Route,
    find_routes,
    is_reachable,
    parse_addresses,
    read_network,
)

RECORDED = Path(__file__).parent / "recorded"
ADDRESSES = (RECORDED / "ip-addr-many-interfaces.json").read_text()
ROUTES = dict(
    line.split("\t", 1) for line in (RECORDED / "ip-route-get.txt").read_text().splitlines()
)


def recorded(argv: Sequence[str]) -> tuple[int, str]:
    """Answer as the recorded machine."""
    if argv == ["ip", "-j", "addr"]:
        return 0, ADDRESSES
    output = ROUTES[argv[-1]]
    return 0 if output.startswith("[") else 2, output + "\n"


def test_bridges_loopback_link_local_and_unplugged_cards_are_no_addresses_to_try() -> None:
    found = read_network(recorded)
    assert [(a.address, a.interface, a.mtu, a.tunnel) for a in found.addresses] == [
        ("192.168.1.2", "eth0", 1500, False),
        ("fd12:3456::2", "eth0", 1500, False),
        ("10.0.0.2", "enp5s0", 9000, False),
        ("10.8.0.6", "tun0", 1500, True),
    ]


def test_a_network_survives_the_way_to_the_launcher() -> None:
    from launcher.hosts.local import LocalConnection
    from trainer.system.untrusted_data import validate_data

    here = LocalConnection().call("machine", {})["network"]
    assert (
        validate_data(Network, json.loads(json.dumps(here)), "network").problem == here["problem"]
    )


@pytest.mark.parametrize("mark", ["temporary", "deprecated", "dadfailed"])
def test_addresses_that_will_not_last(mark: str) -> None:
    links = json.loads(ADDRESSES)
    eth0 = next(link for link in links if link["ifname"] == "eth0")
    for entry in eth0["addr_info"]:
        entry[mark] = entry["family"] == "inet6"
    assert [a.address for a in parse_addresses(json.dumps([eth0])).addresses] == ["192.168.1.2"]


@pytest.mark.parametrize(
    ("flag", "state", "counts"),
    [
        ("LOWER_UP", "DOWN", True),
        ("LOWER_UP", "DORMANT", True),
        ("M-DOWN", "LOWERLAYERDOWN", False),
    ],
)
def test_the_carrier_decides_and_not_the_state_that_follows_it(
    flag: str, state: str, counts: bool
) -> None:
    eth0 = next(link for link in json.loads(ADDRESSES) if link["ifname"] == "eth0")
    eth0 |= {"flags": ["BROADCAST", "MULTICAST", "UP", flag], "operstate": state}
    assert bool(parse_addresses(json.dumps([eth0])).addresses) == counts


def test_routes() -> None:
    found = find_routes(list(ROUTES), recorded)
    assert found["192.168.1.3"] == Route(source="192.168.1.2", interface="eth0", mtu=1500)
    assert found["8.8.8.8"].tunnel  # the VPN has the default route
    assert found["203.0.113.9"].gateway
    assert found["203.0.113.9"].mtu == 1400  # the route's own, below the interface's
    assert found["192.168.1.2"].own
    assert found["127.0.1.1"].own
    assert found["fd12:3456::3"] == Route(source="fd12:3456::2", interface="eth0", mtu=1500)
    assert found["2001:db8::1"].gateway
    assert found["198.51.100.1"] == Route(problem="No route to host")


def test_a_host_name_is_never_resolved() -> None:
    with pytest.raises(ValueError, match="intel"):
        find_routes(["intel"], recorded)


def test_a_machine_without_iproute2_says_so() -> None:
    def absent(argv: Sequence[str]) -> tuple[int, str]:
        return 127, f"{argv[0]}: not installed"

    assert "apt install iproute2" in read_network(absent).problem
    assert "apt install iproute2" in find_routes(["192.0.2.1"], absent)["192.0.2.1"].problem


@pytest.mark.needs("ip")
def test_this_machine_has_a_route_to_itself() -> None:
    assert find_routes(["127.0.0.1"])["127.0.0.1"].own


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::", "169.254.1.1", "fe80::1", "224.0.0.1", "x"],
)
def test_what_no_other_machine_can_reach(address: str) -> None:
    assert not is_reachable(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1", "100.64.0.3", "8.8.8.8"])
def test_what_another_machine_may_reach(address: str) -> None:
    assert is_reachable(address)
