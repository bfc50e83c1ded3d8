"""Links and clusters, also as a line of text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from trainer.planning.device_models import DeviceModel
from trainer.system.backends import BACKENDS
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
DISK_RATE = 1e9
"""Bytes a second of weights that are read from their file again. A guess until it is measured."""
MOST_DEVICES = 65_536
"""Limit of a planned cluster; a rank is a number of 16 bits."""
MAIN_MEMORY = 0.75
"""Share of a host's main memory that its processes may use, where the free part is not known."""
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
class LayerSource:
    """Where layers are read from."""

    name: str
    """`memory` of the host, or `the disk`."""
    rate: float
    """Bytes a second."""
    is_assumed: bool = False

    @property
    def text(self) -> str:
        """Source and rate in words."""
        assumed = " (assumed)" if self.is_assumed else ""
        return f"{self.name} at {self.rate / 1e9:.2g} GB/s{assumed}"


@dataclass(frozen=True, kw_only=True)
class HostPool:
    """Equal devices of equal hosts."""

    hosts: int
    devices: int
    """Devices of each host."""
    device: DeviceModel
    inside: float
    """Bytes a second between the devices of a host."""
    shares_host: bool = False
    """They are in the hosts of the pool before."""
    name: str = ""
    """Name of the host, where a description gives one."""
    main_memory: float | None = None
    """Bytes of each host; None: unknown."""
    disk: float | None = None
    """Bytes a second that a host's disk reads; None: unknown."""
    feed: float = PCIE
    """Bytes a second from a host's memory to a device."""

    @property
    def count(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices

    def find_source(self, size: float) -> LayerSource:
        """Return where its devices read a base of so many bytes: the host's memory, if it fits."""
        if not self.device.is_processor and size <= (self.main_memory or 0) * MAIN_MEMORY:
            return LayerSource(name="memory", rate=self.feed)
        rate = min(self.disk or DISK_RATE, self.feed)
        return LayerSource(name="the disk", rate=rate, is_assumed=self.disk is None)

    @property
    def title(self) -> str:
        """The devices in words."""
        return f"{self.devices} {self.device.name}" if self.devices > 1 else self.device.name


@dataclass(frozen=True, kw_only=True)
class ClusterShape:
    """All devices of a run."""

    groups: tuple[HostPool, ...]
    between: LinkRates | None
    """A host's link to the others; None for one host."""
    remarks: tuple[str, ...] = ()
    """Guesses that were made."""

    @property
    def world(self) -> int:
        """All devices."""
        return sum(group.count for group in self.groups)

    @property
    def hosts(self) -> int:
        """All hosts."""
        return sum(group.hosts for group in self.groups if not group.shares_host)

    @property
    def is_equal(self) -> bool:
        """Whether all hosts and devices are equal."""
        return len(self.groups) == 1

    @property
    def can_share_model(self) -> bool:
        """Whether one model may be spread over its devices: they are equal, and torch's."""
        first = self.groups[0].device
        return self.is_equal and (self.world == 1 or BACKENDS[first.backend].has_torch)

    @property
    def smallest(self) -> HostPool:
        """The group with the least memory to a device."""
        return min(self.groups, key=lambda group: group.device.memory)

    @property
    def text(self) -> str:
        """The cluster in one line."""
        parts: list[str] = []
        for group in self.groups:
            many = f"{group.hosts} x " if group.hosts > 1 else ""
            part = f"{many}{group.devices} {group.device.name}"
            if group.shares_host:
                parts[-1] += f" and {part}"
                continue
            name = f"{group.name}: " if group.name else ""
            size = f" with {format_gib(group.main_memory)} GiB" if group.main_memory else ""
            parts.append(f"{name}{part}{size}")
        link = "" if self.between is None else f", {self.between.text} between hosts"
        return " + ".join(parts) + link


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


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?", re.IGNORECASE)
_TRIP = re.compile(r"(\d+(?:\.\d+)?)\s*ms", re.IGNORECASE)
_SHARED = re.compile(r"half[ -]duplex", re.IGNORECASE)


def is_of_link(part: str) -> bool:
    """Return whether words are a part of `parse_link`'s."""
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
