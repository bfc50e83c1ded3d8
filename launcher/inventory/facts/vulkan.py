"""The GPUs that Vulkan shows, read from `vulkaninfo`, and why a card is not among them.

A software rasteriser (llvmpipe) is listed like a GPU. It is often the only device when the run user
may not open the card, so `kind` distinguishes it. Standard library only, as `pci.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launcher.inventory.facts.pci import NVIDIA, Card

Kind = Literal["discrete", "integrated", "virtual", "software", "other"]

_KINDS: dict[str, Kind] = {
    "PHYSICAL_DEVICE_TYPE_DISCRETE_GPU": "discrete",
    "PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU": "integrated",
    "PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU": "virtual",
    "PHYSICAL_DEVICE_TYPE_CPU": "software",
}
_ORDER = ("discrete", "integrated", "virtual", "other", "software")
_PCI_FIELDS = ("pciDomain", "pciBus", "pciDevice", "pciFunction")
_FIELD = re.compile(r"^\s+(\w+)\s+=\s+(.*?)\s*$")
_GPU = re.compile(r"^\s*GPU\d+:\s*$")


@dataclass(frozen=True)
class Adapter:
    """A physical device as Vulkan shows it."""

    name: str
    kind: Kind
    vendor: str = ""
    """PCI ids as in `pci.Card`: four hexadecimal digits."""
    device: str = ""
    driver: str = ""
    """`radv`, `NVIDIA`, `llvmpipe`."""
    version: str = ""
    uuid: str = ""
    pci: str = ""
    """PCI address; empty until known, and for software."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is a real GPU."""
        return self.kind in ("discrete", "integrated", "virtual")


def parse_vulkaninfo(output: str) -> tuple[Adapter, ...]:
    """Read `vulkaninfo --summary`, or all of `vulkaninfo`, which adds the PCI address.

    Returns every device in Vulkan's order, software included.
    """
    sections: list[dict[str, str]] = []
    for line in output.splitlines():
        if _GPU.match(line):
            sections.append({})
        elif sections and (field := _FIELD.match(line)):
            sections[-1].setdefault(field[1], field[2])
    return tuple(_parse_adapter(fields) for fields in sections if "deviceType" in fields)


def locate_adapters(adapters: Sequence[Adapter], cards: Sequence[Card]) -> tuple[Adapter, ...]:
    """Return the adapters with the PCI addresses that the bus confirms.

    `vulkaninfo --summary` names none. RADV and Intel's driver write it into the device's UUID;
    else a card whose ids occur once on the bus is the one. Otherwise it stays empty.
    """
    by_address = {card.address: card for card in cards}
    placed: list[Adapter] = []
    for adapter in adapters:
        options = [adapter.pci, *_addresses_in(adapter.uuid)]
        same = [card.address for card in cards if _same_model(adapter, card)]
        twins = sum(_same_ids(adapter, other) for other in adapters)
        if len(same) == twins == 1:
            options += same
        confirmed = (a for a in options if a in by_address and _same_model(adapter, by_address[a]))
        placed.append(replace(adapter, pci=next(confirmed, adapter.pci)))
    return tuple(placed)


def select_usable(adapters: Iterable[Adapter], allow_software: bool = False) -> tuple[Adapter, ...]:
    """Return what a wgpu worker may run on, strongest kind first, then by PCI address.

    NVIDIA cards are left out: they train with CUDA. Software devices are included only on request.
    """
    wanted = (
        adapter
        for adapter in adapters
        if (adapter.is_gpu and adapter.vendor != NVIDIA)
        or (allow_software and adapter.kind == "software")
    )
    return tuple(sorted(wanted, key=lambda adapter: (_ORDER.index(adapter.kind), adapter.pci)))


def explain_missing(card: Card, code: int, output: str, accessible: bool, user: str) -> str:
    """Return why a card is not among Vulkan's, and the remedy: one line.

    `code` and `output` are those of vulkaninfo (127: not installed), run as `user`;
    `accessible` is whether that user may open the card's render node.
    """
    if card.driver == "vfio-pci":
        return (
            f"{card.title} is passed through to a virtual machine (vfio-pci): "
            "return it to this host"
        )
    if not card.node:
        return (
            f"{card.title} has no kernel driver: install its firmware (Debian: "
            "firmware-amd-graphics, Ubuntu: linux-firmware), reboot, then check `dmesg`"
        )
    if not accessible:
        return f"{card.title} is not accessible for user {user}: add it to group render"
    if code == 127:
        return f"{card.title} cannot be queried by Vulkan: install vulkan-tools"
    if code == 124:
        return f"{card.title} did not answer Vulkan: {output.strip()}"
    return f"{card.title} has no Vulkan driver: install mesa-vulkan-drivers"


def _parse_adapter(fields: dict[str, str]) -> Adapter:
    pci = ""
    if all(fields.get(name, "").isdigit() for name in _PCI_FIELDS):
        domain, bus, slot, function = (int(fields[name]) for name in _PCI_FIELDS)
        pci = f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
    kind = _KINDS.get(fields["deviceType"], "other")
    return Adapter(
        name=fields.get("deviceName", ""),
        kind=kind,
        vendor=_parse_hexadecimal(fields.get("vendorID", "")),
        device=_parse_hexadecimal(fields.get("deviceID", "")),
        driver=fields.get("driverName", ""),
        version=fields.get("driverInfo", ""),
        uuid=fields.get("deviceUUID", ""),
        pci="" if kind == "software" else pci,
    )


def _parse_hexadecimal(text: str) -> str:
    try:
        return f"{int(text.split()[0], 16):04x}"
    except (ValueError, IndexError):
        return ""


def _same_model(adapter: Adapter, card: Card) -> bool:
    return (adapter.vendor, adapter.device) == (card.vendor, card.device)


def _same_ids(one: Adapter, other: Adapter) -> bool:
    return (one.vendor, one.device) == (other.vendor, other.device)


def _addresses_in(uuid: str) -> list[str]:
    """Return the addresses a UUID may hold, in the two layouts that Mesa uses.

    RADV: domain, bus, device, function as little-endian 32-bit numbers. Intel: vendor, device,
    revision and domain in 16 bits each, then a byte each. A guess: the bus has to confirm it.
    """
    try:
        data = bytes.fromhex(uuid.replace("-", ""))
    except ValueError:
        return []
    if len(data) != 16:
        return []
    domain, bus, slot, function = (
        int.from_bytes(data[start : start + 4], "little") for start in (0, 4, 8, 12)
    )
    radv = f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"
    low = int.from_bytes(data[6:8], "little")
    return [radv, f"{low:04x}:{data[8]:02x}:{data[9]:02x}.{data[10]:x}"]
