"""Find machines that announce themselves by multicast DNS (RFC 6762, RFC 6763)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import select
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICES = ("_motley._tcp.local.", "_ssh._tcp.local.")
"""The service that the recipe announces, and that of many systems."""

_GROUP, _PORT = "224.0.0.251", 5353
_MOST_NAMES = 256
"""Announced names that are read: any machine on a network can announce any number."""
_DETAILS = 1.0
"""Seconds for the addresses of all names that are not known yet."""
_ECHO = 2.0
"""Seconds in which this machine's own question has to come back to it."""


@dataclass(frozen=True)
class Announcement:
    """An announced service. Announcements are not authenticated."""

    name: str
    """The first label of its host name."""
    addresses: tuple[str, ...]
    port: int
    service: str


def browse_announcements(seconds: float) -> tuple[list[Announcement], str]:
    """Return the announcements, and why they are not all (empty if they are)."""
    from zeroconf import (
        InterfaceChoice,
        IPVersion,
        ServiceBrowser,
        ServiceInfo,
        ServiceStateChange,
        Zeroconf,
    )

    seen: set[tuple[str, str]] = set()

    def note_service(
        zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        del zeroconf
        change = seen.discard if state_change is ServiceStateChange.Removed else seen.add
        change((service_type, name))

    problem = find_obstacle()
    if problem:
        return [], problem
    try:
        zeroconf = Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except OSError as error:
        return [], f"mDNS cannot be used here: {error.strerror or error}"
    try:
        browser = ServiceBrowser(zeroconf, list(SERVICES), handlers=[note_service])
        time.sleep(seconds)
        browser.cancel()
        names = sorted(seen.copy())
        infos = [ServiceInfo(*name) for name in names[:_MOST_NAMES]]
        # Mostly in the cache by now; names without an address are asked for once more.
        assert zeroconf.loop is not None
        asyncio.run_coroutine_threadsafe(_complete_infos(zeroconf, infos), zeroconf.loop).result()
        found = [one for info in infos if (one := _parse_announcement(info)) is not None]
        problem = f"mDNS: {len(names)} names are announced, the first {_MOST_NAMES} were read"
        return found, problem if len(names) > _MOST_NAMES else ""
    finally:
        zeroconf.close()


async def _complete_infos(zeroconf: Zeroconf, infos: list[ServiceInfo]) -> None:
    await asyncio.gather(*(info.async_request(zeroconf, 1000 * _DETAILS) for info in infos))


def find_obstacle() -> str:
    """Return why multicast DNS does not work on this machine; empty if it does.

    A question to the group comes back to its sender. If it does not, a firewall drops what others
    would answer as well, and an empty result would prove nothing.
    """
    own = [address for address in _own_addresses() if not address.is_loopback]
    if not own:
        return "mDNS cannot be used here: this machine is on no IPv4 network"
    reasons = [_probe_echo(str(address)) for address in own]
    return "" if "" in reasons else reasons[0]


def _own_addresses() -> Iterator[ipaddress.IPv4Address]:
    import ifaddr

    for adapter in ifaddr.get_adapters():
        for entry in adapter.ips:
            if isinstance(entry.ip, str):
                yield ipaddress.IPv4Address(entry.ip)


def _probe_echo(address: str) -> str:
    """Return why a question sent from an address did not come back; empty if it did."""
    # RFC 6763, 9: a question for all kinds of services, which every responder may answer.
    number = time.monotonic_ns() & 0xFFFF
    labels = b"".join(bytes([len(part)]) + part for part in (b"_services", b"_dns-sd", b"_udp"))
    question = struct.pack(">6H", number, 0, 1, 0, 0, 0) + labels + b"\x05local\0\0\x0c\0\x01"
    interface = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(AttributeError, OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            probe.bind(("", _PORT))
            join = socket.inet_aton(_GROUP) + interface
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, join)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, interface)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            probe.sendto(question, (_GROUP, _PORT))
        except OSError as error:
            return f"mDNS is blocked on {address}: {error.strerror or error}"
        until = time.monotonic() + _ECHO
        while (left := until - time.monotonic()) > 0:
            if select.select([probe], [], [], left)[0] and probe.recv(9000) == question:
                return ""
    return f"mDNS is blocked on {address}: a firewall drops UDP port {_PORT}"


def _parse_announcement(info: ServiceInfo) -> Announcement | None:
    usable = [ip for ip in map(ipaddress.ip_address, info.parsed_addresses()) if _is_usable(ip)]
    addresses = sorted(usable, key=lambda ip: (ip.version, int(ip)))
    if not addresses or not info.server or not info.port:
        return None
    label = info.server.partition(".")[0]
    return Announcement(label, tuple(map(str, addresses)), info.port, info.type)


def _is_usable(ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not (ip.is_loopback or ip.is_multicast or ip.is_unspecified or ip.is_link_local)
