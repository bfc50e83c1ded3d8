"""Known devices and links, and a cluster in one line of text."""

from __future__ import annotations

import difflib
import math
import os
import re
from dataclasses import dataclass, replace

from trainer.system.errors import InputError

GIB = 2**30


def gib(size: float) -> str:
    """Return bytes in GiB, for people: with one decimal, or two digits if that would be 0.0."""
    amount = size / GIB
    return f"{amount:.1f}" if amount >= 0.05 or not size else f"{amount:.2g}"


def size_text(size: float) -> str:
    """Return bytes in the unit in which people read them: `18.6 GiB`, `12 MiB`."""
    return f"{gib(size)} GiB" if size >= GIB / 10 else f"{size / 2**20:.2g} MiB"


def count_text(count: float) -> str:
    """Return a number of weights in the unit in which people read it: `4.02 billion`."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


@dataclass(frozen=True, kw_only=True)
class DeviceModel:
    """One accelerator, or a processor."""

    name: str
    flops: float | None
    """A second, dense, in the 16-bit format that trains (fp32 on a processor); None: unknown."""
    memory: float
    """Bytes."""
    watts: float | None
    """Most power; None: unknown."""
    fp32: float | None = None
    """The same of an accelerator in fp32, by its matrix units only where they take it whole:
    torch rounds no product to TF32 unless it is told to. None: unknown."""
    nvlink: float | None = None
    """Bytes a second to the other devices of its host, in one direction."""
    source: str
    """Its maker and where the figures are from, or `assumed`."""

    @property
    def is_processor(self) -> bool:
        """Whether it is a host's processor."""
        return self.name.startswith("CPU")

    @property
    def computes_cuda(self) -> bool:
        """Whether it is a card of NVIDIA, or an unknown one, which may be."""
        return not self.is_processor and self.source.split(",")[0] in ("NVIDIA", "assumed")


def _device(
    name: str,
    teraflops: float | None,
    wide: float | None,
    gib: int,
    watts: float | None,
    source: str,
    nvlink: float = 0,
) -> DeviceModel:
    return DeviceModel(
        name=name,
        flops=teraflops and teraflops * 1e12,
        fp32=wide and wide * 1e12,
        memory=gib * GIB,
        watts=watts,
        nvlink=nvlink * 1e9 or None,
        source=source,
    )


_NVIDIA = "NVIDIA, data sheet of the"
_AMD = "AMD, product page of the"
_TURING = "NVIDIA, Turing white paper, reference clocks, fp32 sums"
_AMPERE = "NVIDIA, GA102 white paper or product page: twice the fp32 rate, fp32 sums"
_ADA = "NVIDIA, Ada white paper or product page: twice the fp32 rate, fp32 sums"
_BLACKWELL = "NVIDIA, Blackwell white paper or product page: twice the fp32 rate, fp32 sums"
_APPLE = "Apple, newsroom; 16 bits as fp32, of unified memory"
DEVICES: dict[str, DeviceModel] = {
    device.name: device
    for device in (
        _device("V100-32G", 125, 15.7, 32, 300, f"{_NVIDIA} V100 SXM2", 150),
        _device("T4", 65, 8.1, 16, 70, f"{_NVIDIA} T4"),
        _device("A100-40G", 312, 19.5, 40, 400, f"{_NVIDIA} A100 SXM", 300),
        _device("A100-80G", 312, 19.5, 80, 400, f"{_NVIDIA} A100 SXM", 300),
        _device("A6000", 154.8, 38.7, 48, 300, f"{_NVIDIA} RTX A6000", 56.25),
        _device("L4", 121, 30.3, 24, 72, f"{_NVIDIA} L4, without sparsity"),
        _device("L40S", 362, 91.6, 48, 350, f"{_NVIDIA} L40S, without sparsity"),
        _device("H100-80G", 989, 67, 80, 700, f"{_NVIDIA} H100 SXM, without sparsity", 450),
        _device("H200", 989, 67, 141, 700, f"{_NVIDIA} H200 SXM, without sparsity", 450),
        _device("B200", 2250, None, 180, 1000, f"{_NVIDIA} DGX B200, dense, no fp32", 900),
        _device("P40", None, 12, 24, 250, f"{_NVIDIA} Tesla P40, whose 16 bits are slow"),
        _device("P100", 18.7, 9.3, 16, 250, f"{_NVIDIA} Tesla P100 PCIe"),
        _device("A2000-12G", 31.9, 8, 12, 70, f"{_NVIDIA} RTX A2000, without sparsity"),
        _device("A2000-6G", 31.9, 8, 6, 70, f"{_NVIDIA} RTX A2000, without sparsity"),
        _device("A4000", 76.7, 19.2, 16, 140, f"{_NVIDIA} RTX A4000, without sparsity"),
        _device("A5000", 111.1, 27.8, 24, 230, f"{_NVIDIA} RTX A5000, no sparsity", 56.25),
        _device("RTX2070", 29.9, 7.5, 8, 175, _TURING),
        _device("RTX2080", 40.3, 10.1, 8, 215, _TURING, 25),
        _device("RTX2080Ti", 53.8, 13.4, 11, 250, _TURING, 50),
        _device("RTX3060", 25.5, 12.7, 12, 170, _AMPERE),
        _device("RTX3060Ti", 32.4, 16.2, 8, 200, _AMPERE),
        _device("RTX3070", 40.6, 20.3, 8, 220, _AMPERE),
        _device("RTX3070Ti", 43.5, 21.7, 8, 290, _AMPERE),
        _device("RTX3080", 59.5, 29.8, 10, 320, _AMPERE),
        _device("RTX3080Ti", 68.2, 34.1, 12, 350, _AMPERE),
        _device("RTX4060", 30.2, 15.1, 8, 115, _ADA),
        _device("RTX4060Ti-16G", 44.1, 22.1, 16, 165, _ADA),
        _device("RTX4060Ti-8G", 44.1, 22.1, 8, 160, _ADA),
        _device("RTX4070", 58.3, 29.1, 12, 200, _ADA),
        _device("RTX4070Super", 71, 35.5, 12, 220, _ADA),
        _device("RTX4070Ti", 80.2, 40.1, 12, 285, _ADA),
        _device("RTX4070TiSuper", 88.2, 44.1, 16, 285, _ADA),
        _device("RTX4080", 97.5, 48.7, 16, 320, _ADA),
        _device("RTX4080Super", 104.4, 52.2, 16, 320, _ADA),
        _device("RTX5060Ti-16G", 47.4, 23.7, 16, 180, _BLACKWELL),
        _device("RTX5070", 61.7, 30.9, 12, 250, _BLACKWELL),
        _device("RTX5070Ti", 87.9, 43.9, 16, 300, _BLACKWELL),
        _device("RTX5080", 112.6, 56.3, 16, 360, _BLACKWELL),
        _device("RTX3090", 71, 35.6, 24, 350, "NVIDIA, GA102 white paper, fp32 sums", 56.25),
        _device("RTX4090", 165.2, 82.6, 24, 450, "NVIDIA, Ada white paper, fp32 sums"),
        _device("RTX5090", 209.5, 104.8, 32, 575, "NVIDIA, Blackwell white paper, fp32 sums"),
        _device("RX5700XT", 19.5, 9.75, 8, 225, f"{_AMD} RX 5700 XT"),
        _device("W5700X", 19, 9.5, 16, None, f"{_AMD} Radeon Pro W5700X"),
        _device("RX6700XT", 26.4, 13.2, 12, 230, f"{_AMD} RX 6700 XT"),
        _device("RX6800", 32.3, 16.2, 16, 250, f"{_AMD} RX 6800"),
        _device("RX6800XT", 41.5, 20.7, 16, 300, f"{_AMD} RX 6800 XT"),
        _device("RX6900XT", 46.1, 23, 16, 300, f"{_AMD} RX 6900 XT"),
        _device("RX7600", 43.5, 21.8, 8, 165, f"{_AMD} RX 7600"),
        _device("RX7800XT", 74.7, 37.3, 16, 263, f"{_AMD} RX 7800 XT"),
        _device("RX7900GRE", 92, 46, 16, 260, f"{_AMD} RX 7900 GRE"),
        _device("RX7900XT", 103.2, 51.6, 20, 315, f"{_AMD} RX 7900 XT"),
        _device("A770", 131, 17.2, 16, 225, "Intel, ARK of the Arc A770 16 GB"),
        _device("M1Ultra-64G", 21, 21, 64, None, _APPLE),
        _device("M1Ultra-128G", 21, 21, 128, None, _APPLE),
        _device("M2Ultra-64G", 27.2, 27.2, 64, None, _APPLE),
        _device("M2Ultra-128G", 27.2, 27.2, 128, None, _APPLE),
        _device("M2Ultra-192G", 27.2, 27.2, 192, None, _APPLE),
        _device("RX7900XTX", 122.8, 61.4, 24, 355, "AMD, product page of the RX 7900 XTX"),
        _device("MI250X", 383, 95.7, 128, 560, "AMD, data sheet of the MI250X", 350),
        _device("MI300X", 1307.4, 163.4, 192, 750, "AMD, data sheet of the MI300X", 448),
    )
}
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

    def seconds(self, up: float, down: float) -> float:
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


def find_device(name: str) -> DeviceModel:
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
    near = ", ".join(known for known in DEVICES if _plain(known) in close)
    near = f"near it: {near}" if near else f"known: {', '.join(DEVICES)}"
    raise InputError(f"unknown device {name}; {near}; any card by its memory: 8GB")


def _plain(name: str) -> str:
    words = re.sub(r"\(r\)|\(tm\)|\(.*", "", name.lower())
    words = words.replace("rtx a", "a")
    for word in (
        "radeon pro",
        "intel",
        "arc",
        "graphics",
        "apple",
        "nvidia",
        "geforce",
        "amd",
        "radeon",
        "instinct",
        "tesla",
        "sxm",
        "pcie",
        "hbm3",
    ):
        words = words.replace(word, "")
    return re.sub(r"[^a-z0-9]|gb$", "", words.replace("gb", "g"))


def parse_cluster(text: str) -> ClusterShape:
    """Return a cluster such as `8xA100-80G nvlink, 2 hosts, 200gbit`.

    `8x` are the devices of each host. Groups of other hosts follow after `;`.

    Raises:
        InputError: a part cannot be read, a device is unknown, or hosts have no link.
    """
    parts = [[part.strip() for part in words.split(",")] for words in text.split(";")]
    links = [part for group in parts for part in group if _is_of_link(part)]
    groups = tuple(
        _parse_group([part for part in group if not _is_of_link(part)], text) for group in parts
    )
    return linked(
        ClusterShape(groups=groups, between=parse_link(", ".join(links)) if links else None)
    )


def linked(cluster: ClusterShape) -> ClusterShape:
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


def processor(cores: int, memory: float) -> DeviceModel:
    """Return a host's processor, at a speed that is assumed of each core."""
    name, flops = f"CPU, {cores} cores", cores * CORE_FLOPS
    return DeviceModel(name=name, flops=flops, memory=memory, watts=None, source="assumed")


def _sized(text: str) -> DeviceModel | None:
    """Return a card of which only the memory is known, such as `8GB`, or a processor.

    `CPU` is this machine's, `CPU8-300GB` one of 8 cores with 300 GiB.
    """
    if match := re.fullmatch(r"(\d+)\s*G(?:i?B)?", text, re.I):
        name, memory = f"{match[1]}GB", int(match[1]) * GIB
        return DeviceModel(name=name, flops=None, memory=memory, watts=None, source="assumed")
    if match := re.fullmatch(r"cpu([1-9]\d*)-(\d+)\s*G(?:i?B)?", text, re.I):
        return processor(int(match[1]), int(match[2]) * GIB)
    if text.lower() == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return processor(os.cpu_count() or 1, memory)
    return None


def _parse_group(parts: list[str], text: str) -> HostPool:
    hosts, found = 1, None
    for part in parts:
        if match := re.fullmatch(r"(\d+)\s*x\s*(\S.*?)(?:\s+(nvlink|pcie))?", part, re.I):
            found = match
        elif match := re.fullmatch(r"(\d+)\s+hosts?", part, re.I):
            hosts = int(match[1])
        else:
            raise InputError(
                f"--cluster: cannot read {part!r} in {text!r}; write it as"
                " '8xA100-80G nvlink, 2 hosts, 200gbit'"
            )
    if found is None or int(found[1]) < 1 or hosts < 1:
        raise InputError(f"--cluster: {text!r} needs devices, such as 8xA100-80G, and no zero")
    device = _sized(found[2]) or find_device(found[2])
    inside = PCIE
    if (found[3] or "").lower() == "nvlink":
        if device.nvlink is None:
            raise InputError(f"--cluster: a {device.name} has no NVLink; write pcie")
        inside = device.nvlink
    return HostPool(hosts=hosts, devices=int(found[1]), device=device, inside=inside)
