"""Links and clusters, also as a line of text."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass, replace

from trainer.planning.device_models import DeviceModel, find_device
from trainer.system.errors import InputError

GIB = 2**30


def format_gib(size: float) -> str:
    """Return bytes in GiB, for people: with one decimal, or two digits if that would be 0.0."""
    amount = size / GIB
    return f"{amount:.1f}" if amount >= 0.05 or not size else f"{amount:.2g}"


def size_text(size: float) -> str:
    """Return bytes in the unit in which people read them: `18.6 GiB`, `12 MiB`."""
    return f"{format_gib(size)} GiB" if size >= GIB / 10 else f"{size / 2**20:.2g} MiB"


def count_text(count: float) -> str:
    """Return a number of weights in the unit in which people read it: `4.02 billion`."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


PCIE = 25e9
"""Bytes a second over PCIe 4.0 x16, of 31.5 in theory."""
MOST_DEVICES = 65_536
"""Of a cluster that is planned; a rank is a number of 16 bits."""
CORE_FLOPS = 64e9
"""A second, of a core: 2 fused products of 8 fp32 at 2 GHz. A guess until it is measured."""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Between two hosts, in bytes of payload a second.

    Raises:
        InputError: a rate is not positive, or the round trip is negative.
    """

    up: float
    """Towards the coordinator."""
    down: float
    half_duplex: bool = False
    """Both directions share one rate, as over Wi-Fi."""
    round_trip: float = 0.0
    """Seconds."""

    def __post_init__(self) -> None:
        if not (0 < self.up < math.inf and 0 < self.down < math.inf and self.round_trip >= 0):
            raise InputError(
                f"a link needs positive rates and a round trip of at least 0 s, not {self.up:g} and"
                f" {self.down:g} bytes a second and {self.round_trip:g} s"
            )

    def transfer_seconds(self, up: float, down: float) -> float:
        """Return how long so many bytes take in both directions."""
        there, back = up / self.up, down / self.down
        return there + back if self.half_duplex else max(there, back)

    @property
    def text(self) -> str:
        """The link in words."""
        rates = sorted({self.up, self.down})
        words = ["/".join(f"{8 * rate / 1e9:g}" for rate in rates) + " Gbit/s"]
        words += [f"{1000 * self.round_trip:g} ms"] if self.round_trip else []
        words += ["half duplex"] if self.half_duplex else []
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class HostPool:
    """Equal hosts with equal devices."""

    hosts: int
    devices: int
    """Of each host."""
    device: DeviceModel
    inside: float
    """Bytes a second between the devices of a host."""


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """All devices of a run."""

    groups: tuple[HostPool, ...]
    between: LinkRates | None
    """A host's link to the others; None for one host."""
    remarks: tuple[str, ...] = ()
    """What was guessed."""

    @property
    def world(self) -> int:
        """All devices."""
        return sum(group.hosts * group.devices for group in self.groups)

    @property
    def hosts(self) -> int:
        """All hosts."""
        return sum(group.hosts for group in self.groups)

    @property
    def is_equal(self) -> bool:
        """Whether all hosts and devices are equal."""
        return len(self.groups) == 1

    @property
    def smallest(self) -> HostPool:
        """The group with the least memory to a device."""
        return min(self.groups, key=lambda group: group.device.memory)

    @property
    def text(self) -> str:
        """The cluster in one line."""
        parts = [
            f"{group.hosts} x {group.devices} {group.device.name}"
            if group.hosts > 1
            else f"{group.devices} {group.device.name}"
            for group in self.groups
        ]
        link = "" if self.between is None else f", {self.between.text} between hosts"
        return " + ".join(parts) + link


def parse_cluster(text: str, link: str | None = None) -> ClusterShape:
    """Return a cluster such as `8xA100-80G nvlink, 2 hosts, 200gbit`.

    `8x` are the devices of each host, one if it is left out. Groups of other hosts follow after
    `;`. A `link` may be given apart.

    Raises:
        InputError: a part cannot be read, a device is unknown, several hosts have no link or two,
            or a `link` is given for one host.
    """
    parts = [[part.strip() for part in words.split(",")] for words in text.split(";")]
    links = [part for group in parts for part in group if _is_of_link(part)]
    groups = tuple(
        _parse_group([part for part in group if not _is_of_link(part)], text) for group in parts
    )
    if link is not None and links:
        raise InputError(f"--link {link}: --cluster has a link too: {', '.join(links)}; give one")
    rates = link if link is not None else ", ".join(links)
    cluster = ClusterShape(groups=groups, between=parse_link(rates) if rates else None)
    if cluster.hosts == 1 and link is not None:
        raise InputError(f"--link {link}: is between hosts, and --cluster has one; add '2 hosts'")
    return with_links(cluster)


def with_links(cluster: ClusterShape) -> ClusterShape:
    """Return a cluster whose hosts can reach each other.

    Raises:
        InputError: there are several hosts and no rate between them.
    """
    if cluster.world > MOST_DEVICES:
        raise InputError(f"{cluster.world:,} devices; a plan has at most {MOST_DEVICES:,}")
    if cluster.hosts > 1 and cluster.between is None:
        raise InputError(
            f"{cluster.hosts} hosts and no link between them; add its rate, such as 200gbit"
        )
    return cluster if cluster.hosts > 1 else replace(cluster, between=None)


_DEVICES = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*?)(?:\s+(nvlink|pcie))?", re.IGNORECASE)
"""Devices of a host: how many, which, and the link between them."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?", re.IGNORECASE)
_TRIP = re.compile(r"(\d+(?:\.\d+)?)\s*ms", re.IGNORECASE)
_SHARED = re.compile(r"half[ -]duplex", re.IGNORECASE)


def _is_of_link(part: str) -> bool:
    return any(kind.fullmatch(part) for kind in (_RATE, _TRIP, _SHARED))


def parse_link(text: str) -> LinkRates:
    """Return a link such as `50mbit, 20ms, half duplex`; of several rates the lowest.

    The milliseconds are of a round trip.

    Raises:
        InputError: it has no rate, or one of zero, or something else.
    """
    rates, trip, shared = list[float](), 0.0, False
    for part in (piece.strip() for piece in text.split(",")):
        if match := _RATE.fullmatch(part):
            rates.append(float(match[1]) * (1e9 if match[2].lower() == "g" else 1e6) / 8)
        elif match := _TRIP.fullmatch(part):
            trip = max(trip, float(match[1]) / 1000)
        elif _SHARED.fullmatch(part):
            shared = True
        else:
            rates.append(0.0)
    if not min(rates, default=0.0):
        raise InputError(f"{text!r} is not a rate; write 200gbit, or 50mbit, 20ms, half duplex")
    return LinkRates(up=min(rates), down=min(rates), half_duplex=shared, round_trip=trip)


def assume_processor(cores: int, memory: float) -> DeviceModel:
    """Return a host's processor, at a speed that is assumed of each core."""
    name, flops = f"CPU, {cores} cores", cores * CORE_FLOPS
    return DeviceModel(name=name, flops=flops, memory=memory, watts=None, source="assumed")


def _parse_sized(text: str) -> DeviceModel | None:
    """Return a card of which only the memory is known, such as `8GB`, or a processor.

    `CPU` is this machine's, `CPU8-300GB` one of 8 cores with 300 GiB.
    """
    if match := re.fullmatch(r"(\d+)\s*G(?:i?B)?", text, re.I):
        name, memory = f"{match[1]}GB", int(match[1]) * GIB
        return DeviceModel(name=name, flops=None, memory=memory, watts=None, source="assumed")
    if match := re.fullmatch(r"cpu([1-9]\d*)-(\d+)\s*G(?:i?B)?", text, re.I):
        return assume_processor(int(match[1]), int(match[2]) * GIB)
    if text.lower() == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return assume_processor(os.cpu_count() or 1, memory)
    return None


def _parse_group(parts: list[str], text: str) -> HostPool:
    hosts, found = 1, None
    for part in parts:
        if match := re.fullmatch(r"(\d+)\s+hosts?", part, re.I):
            hosts = int(match[1])
        elif found is None and (match := _DEVICES.fullmatch(part)):
            found = match
        else:
            raise InputError(
                f"--cluster: cannot read {part!r} in {text!r}; write it as"
                " '8xA100-80G nvlink, 2 hosts, 200gbit', and other hosts after ';'"
            )
    count = int(found[1] or 1) if found is not None else 0
    if found is None or count < 1 or hosts < 1:
        raise InputError(f"--cluster: {text!r} needs devices, such as 8xA100-80G, and no zero")
    link = (found[3] or "").lower()
    device = _parse_sized(found[2]) or _find_device(found[2], link)
    inside = PCIE
    if link == "nvlink":
        if device.nvlink is None:
            raise InputError(f"--cluster: a {device.name} has no NVLink; write pcie")
        inside = device.nvlink
    return HostPool(hosts=hosts, devices=count, device=device, inside=inside)


def _find_device(name: str, link: str) -> DeviceModel:
    """Return a device; `H100 pcie` is the card of that form, which has a row of its own."""
    if link == "pcie":
        with contextlib.suppress(InputError):
            return find_device(f"{name} {link}")
    return find_device(name)
