"""Known devices and links, and a cluster in one line of text."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from trainer.errors import InputError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or a processor."""

    name: str
    flops: float | None
    """A second, dense, in the 16-bit format that trains (fp32 on a processor); None: unknown."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second of its memory."""
    watts: float | None
    """Most power; None: unknown."""
    nvlink: float | None = None
    """Bytes a second to the other devices of its host, in one direction."""
    source: str


def _device(
    name: str, teraflops: float, gib: int, gb_s: float, watts: float, source: str, nvlink: float = 0
) -> Device:
    return Device(
        name=name, flops=teraflops * 1e12, memory=gib * GIB, bandwidth=gb_s * 1e9, watts=watts,
        nvlink=nvlink * 1e9 or None, source=source,
    )  # fmt: skip


_NVIDIA = "NVIDIA, data sheet of the"
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("V100-32G", 125, 32, 900, 300, f"{_NVIDIA} V100 SXM2", 150),
        _device("T4", 65, 16, 320, 70, f"{_NVIDIA} T4"),
        _device("A100-40G", 312, 40, 1555, 400, f"{_NVIDIA} A100 SXM", 300),
        _device("A100-80G", 312, 80, 2039, 400, f"{_NVIDIA} A100 SXM", 300),
        _device("A6000", 154.8, 48, 768, 300, f"{_NVIDIA} RTX A6000", 56.25),
        _device("L4", 121, 24, 300, 72, f"{_NVIDIA} L4, without sparsity"),
        _device("L40S", 362, 48, 864, 350, f"{_NVIDIA} L40S, without sparsity"),
        _device("H100-80G", 989, 80, 3350, 700, f"{_NVIDIA} H100 SXM, without sparsity", 450),
        _device("H200", 989, 141, 4800, 700, f"{_NVIDIA} H200 SXM, without sparsity", 450),
        _device("B200", 2250, 180, 8000, 1000, f"{_NVIDIA} DGX B200, without sparsity", 900),
        _device("RTX3090", 71, 24, 936, 350, "NVIDIA, GA102 white paper, fp32 sums", 56.25),
        _device("RTX4090", 165.2, 24, 1008, 450, "NVIDIA, Ada white paper, fp32 sums"),
        _device("RTX5090", 209.5, 32, 1792, 575, "NVIDIA, Blackwell white paper, fp32 sums"),
        _device("RX7900XTX", 122.8, 24, 960, 355, "AMD, product page of the RX 7900 XTX"),
        _device("MI250X", 383, 128, 3277, 560, "AMD, data sheet of the MI250X", 350),
        _device("MI300X", 1307.4, 192, 5300, 750, "AMD, data sheet of the MI300X", 448),
    )
}
PCIE = 25e9
"""Bytes a second over PCIe 4.0 x16, of 31.5 in theory."""
CORE_FLOPS = 64e9
"""A second, of a core: 2 fused products of 8 fp32 at 2 GHz. A guess until it is measured."""


@dataclass(frozen=True, kw_only=True)
class HostGroup:
    """Equal hosts with equal devices."""

    hosts: int
    devices: int
    """Of each host."""
    device: Device
    inside: float
    """Bytes a second between the devices of a host."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All devices of a run."""

    groups: tuple[HostGroup, ...]
    between: float | None
    """Bytes a second of a host's link to the others; None for one host."""
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
    def smallest(self) -> HostGroup:
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
        rate = "" if self.between is None else f", {8 * self.between / 1e9:g} Gbit/s between hosts"
        return " + ".join(parts) + rate


def find_device(name: str) -> Device:
    """Return a known device; case, `-`, spaces and a maker's words do not matter.

    Raises:
        InputError: it is unknown; names the nearest ones.
    """
    wanted = _plain(name)
    for device in DEVICES.values():
        known = _plain(device.name)
        model, _, size = device.name.lower().partition("-")
        if wanted == known or (wanted.startswith(model) and size and size in wanted):
            return device
    for device in DEVICES.values():
        if _plain(device.name.partition("-")[0]) == wanted:
            return device
    close = difflib.get_close_matches(wanted, [_plain(known) for known in DEVICES], n=3, cutoff=0.4)
    near = [known for known in DEVICES if _plain(known) in close] or list(DEVICES)
    raise InputError(f"unknown device {name}; near it: {', '.join(near)}")


def _plain(name: str) -> str:
    words = name.lower()
    words = words.replace("rtx a", "a")
    for word in ("nvidia", "geforce", "amd", "radeon", "instinct", "tesla", "sxm", "pcie", "hbm3"):
        words = words.replace(word, "")
    return re.sub(r"[^a-z0-9]|gb$", "", words.replace("gb", "g"))


def parse_cluster(text: str) -> Cluster:
    """Return a cluster such as `8xA100-80G nvlink, 2 hosts, 200gbit`.

    `8x` are the devices of each host. Groups of other hosts follow after `;`.

    Raises:
        InputError: a part cannot be read, a device is unknown, or hosts have no link.
    """
    rates: list[float] = []
    groups: list[HostGroup] = []
    for words in text.split(";"):
        group, rate = _parse_group(words, text)
        groups.append(group)
        rates += [] if rate is None else [rate]
    cluster = Cluster(groups=tuple(groups), between=min(rates, default=None))
    return linked(cluster)


def linked(cluster: Cluster) -> Cluster:
    """Return a cluster whose hosts can reach each other.

    Raises:
        InputError: there are several hosts and no rate between them.
    """
    if cluster.hosts > 1 and cluster.between is None:
        raise InputError(
            f"{cluster.hosts} hosts and no link between them; add its rate, such as 200gbit"
        )
    return cluster if cluster.hosts > 1 else replace(cluster, between=None)


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Return a rate such as `200gbit` in bytes a second.

    Raises:
        InputError: it is none, or zero.
    """
    found = _RATE.fullmatch(text.strip())
    rate = 0.0
    if found is not None:
        rate = float(found[1]) * (1e9 if found[2].lower() == "g" else 1e6) / 8
    if rate == 0:
        raise InputError(f"{text!r} is no rate; write it as 200gbit or 100mbit")
    return rate


def _parse_group(words: str, text: str) -> tuple[HostGroup, float | None]:
    hosts, rate, found = 1, None, None
    for part in (piece.strip() for piece in words.split(",")):
        if match := re.fullmatch(
            r"(\d+)\s*x\s*(\S+(?:\s+\d+GB?)?)(?:\s+(nvlink|pcie))?", part, re.I
        ):
            found = match
        elif match := re.fullmatch(r"(\d+)\s+hosts?", part, re.I):
            hosts = int(match[1])
        elif _RATE.fullmatch(part):
            rate = parse_rate(part)
        else:
            raise InputError(
                f"--cluster: cannot read {part!r} in {text!r}; write it as"
                " '8xA100-80G nvlink, 2 hosts, 200gbit'"
            )
    if found is None or int(found[1]) < 1 or hosts < 1:
        raise InputError(f"--cluster: {text!r} needs devices, such as 8xA100-80G, and no zero")
    device = find_device(found[2])
    inside = PCIE
    if (found[3] or "").lower() == "nvlink":
        if device.nvlink is None:
            raise InputError(f"--cluster: a {device.name} has no NVLink; write pcie")
        inside = device.nvlink
    return HostGroup(hosts=hosts, devices=int(found[1]), device=device, inside=inside), rate
