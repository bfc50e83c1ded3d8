"""This machine's addresses and routes, as `ip -j` reports them. Names are never resolved here.

A host's own name does not give its address: Debian's installer maps it to 127.0.1.1.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.inventory.facts.devices import Runner, run_command

# Made by container and VM software: they lead to no other machine, or only to guests of this one.
_PRIVATE_BRIDGES = re.compile(
    r"docker|br-[0-9a-f]{12}|veth|virbr|vnet|vmnet|vboxnet|lxcbr|lxdbr|incusbr|podman|cni|flannel|"
    r"cali|kube|nerdctl|ve-|vb-"
)
_TUNNELS = re.compile(r"tun|tap|wg|tailscale|ppp|zt|ipsec|vti|gre|sit|nebula")


@dataclass(frozen=True)
class Address:
    """One address at which another machine may reach this one."""

    address: str
    prefix: int
    interface: str
    mtu: int
    tunnel: bool = False
    """It belongs to a VPN: slower, and not reachable by all."""

    def __post_init__(self) -> None:
        ipaddress.ip_address(self.address)  # other hosts connect to it


@dataclass(frozen=True)
class Network:
    """The candidate addresses of a machine; `problem` is why none could be read."""

    addresses: tuple[Address, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Route:
    """The route from this machine to one address; `problem` when there is none."""

    source: str = ""
    """This machine's own address on it."""
    interface: str = ""
    gateway: bool = False
    """The target is behind a router."""
    own: bool = False
    """The target is this machine."""
    tunnel: bool = False
    mtu: int | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        if self.source:
            ipaddress.ip_address(self.source)


def read_network(run: Runner = run_command) -> Network:
    """Return this machine's addresses, in the order of its interfaces."""
    code, output = run(["ip", "-j", "addr"])
    if code != 0:
        return Network(problem=_explain_failure(output, code))
    return parse_addresses(output)


def find_routes(targets: Sequence[str], run: Runner = run_command) -> dict[str, Route]:
    """Return the route to each of the given IP addresses."""
    mtus = {entry.interface: entry.mtu for entry in read_network(run).addresses}
    found: dict[str, Route] = {}
    for target in targets:
        code, output = run(["ip", "-j", "route", "get", str(ipaddress.ip_address(target))])
        found[target] = (
            parse_route(output, mtus)
            if code == 0
            else Route(problem=_explain_failure(output, code))
        )
    return found


def parse_addresses(output: str) -> Network:
    """Read `ip -j addr`: addresses with a carrier, reachable from elsewhere and not temporary."""
    found: list[Address] = []
    for link in json.loads(output or "[]"):
        name = str(link["ifname"])
        # Not `operstate`: the kernel sets it some time after the carrier is there.
        if "LOOPBACK" in link["flags"] or "LOWER_UP" not in link["flags"]:
            continue
        if _PRIVATE_BRIDGES.match(name):
            continue
        for entry in link.get("addr_info", ()):
            # `temporary` is an IPv6 privacy address: it changes within a day.
            spoiled = any(entry.get(mark) for mark in ("temporary", "deprecated", "dadfailed"))
            if spoiled or not is_reachable(entry.get("local", "")):
                continue
            address = Address(
                str(entry["local"]),
                int(entry["prefixlen"]),
                name,
                int(link["mtu"]),
                _is_tunnel(link),
            )
            found.append(address)
    return Network(tuple(found))


def parse_route(output: str, mtus: Mapping[str, int] | None = None) -> Route:
    """Read one answer of `ip -j route get`; `mtus` are those of the interfaces."""
    entries: list[dict[str, Any]] = json.loads(output or "[]")
    if not entries:
        return Route(problem="no route")
    entry = entries[0]
    if entry.get("type") in ("unreachable", "blackhole", "prohibit"):
        return Route(problem=f"the route is {entry['type']}")
    interface = str(entry.get("dev", ""))
    limit = next((m["mtu"] for m in entry.get("metrics", ()) if "mtu" in m), None)
    return Route(
        source=str(entry.get("prefsrc", "")),
        interface=interface,
        gateway="gateway" in entry or "via" in entry,
        own=entry.get("type") == "local" or interface == "lo",
        tunnel=_TUNNELS.match(interface) is not None,
        mtu=limit or (mtus or {}).get(interface),
    )


def is_reachable(address: str) -> bool:
    """Whether another machine could reach this one at an address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (
        parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified or parsed.is_multicast
    )


def format_speed(bits: float) -> str:
    """Return bit/s for people."""
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def _is_tunnel(link: Mapping[str, Any]) -> bool:
    return link.get("link_type") in ("none", "ppp") or _TUNNELS.match(link["ifname"]) is not None


def _explain_failure(output: str, code: int) -> str:
    if code == 127:
        return "`ip` is missing (apt install iproute2)"
    lines = output.strip().splitlines() or [f"`ip` exited with code {code}"]
    return lines[-1].removeprefix("RTNETLINK answers: ")
