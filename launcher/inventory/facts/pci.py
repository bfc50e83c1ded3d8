"""The graphics cards on the PCI bus, whether or not a driver supports them.

sysfs lists them; a recipe reads the same from `lspci -nn -D`, which adds names. Standard
library only: it runs on every host, and inside Ansible's filters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.system.kernel_files import read_content, read_number

PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, AMD, INTEL = "10de", "1002", "8086"
MAKERS = {NVIDIA: "NVIDIA", AMD: "AMD", INTEL: "Intel"}
"""Makers of cards that can train. Others (a server's management chip, a virtual display) cannot."""

_DISPLAY_CLASSES = ("0300", "0302", "0380")  # VGA, 3D controller, other display controller
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
_LSPCI = re.compile(
    r"^(?P<address>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) .*?\[(?P<kind>[0-9a-f]{4})\]: "
    r"(?P<name>.*) \[(?P<vendor>[0-9a-f]{4}):(?P<device>[0-9a-f]{4})\](?: \(rev .*\))?$"
)


@dataclass(frozen=True)
class Card:
    """A graphics card of one of the MAKERS."""

    address: str
    """As the kernel spells it: `0000:0b:00.0`."""
    vendor: str
    device: str
    name: str = ""
    driver: str = ""
    """The kernel driver bound to it; empty without one, or when lspci was the source."""
    node: str = ""
    """Its render node, `/dev/dri/renderD128`; empty without one."""
    memory: int | None = None
    """Bytes of its own memory if the driver reports it (amdgpu)."""

    @property
    def title(self) -> str:
        """Address and name, for people."""
        maker = MAKERS.get(self.vendor, self.vendor)
        return f"{self.address} {self.name or f'{maker} card {self.vendor}:{self.device}'}"


def normal_address(address: str) -> str:
    """Return the kernel's spelling of a PCI address; NVIDIA pads the domain to 8 digits."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def read_cards(pci: Path = PCI_DEVICES) -> tuple[Card, ...]:
    """Return the cards of a sysfs PCI folder, in bus order; none if there is no PCI."""
    if not pci.is_dir():
        return ()
    found: list[Card] = []
    for folder in sorted(pci.iterdir()):
        vendor, kind = (
            read_content(folder / name).removeprefix("0x") for name in ("vendor", "class")
        )
        if vendor in MAKERS and kind[:4] in _DISPLAY_CLASSES:
            found.append(
                Card(
                    folder.name,
                    vendor,
                    read_content(folder / "device").removeprefix("0x"),
                    driver=_read_driver(folder),
                    node=_render_node(folder),
                    memory=read_number(folder / "mem_info_vram_total"),
                )
            )
    return tuple(found)


def parse_lspci(output: str) -> tuple[Card, ...]:
    """Read `lspci -nn -D`: the cards that can train, in bus order.

    Sound functions, management chips (ASPEED, Matrox) and virtual displays are left out.
    """
    found: list[Card] = []
    for line in output.splitlines():
        match = _LSPCI.match(line.strip().lower())
        if match is None or match["kind"] not in _DISPLAY_CLASSES or match["vendor"] not in MAKERS:
            continue
        start, end = match.span("name")
        found.append(
            Card(
                normal_address(match["address"]),
                match["vendor"],
                match["device"],
                _short_name(line.strip()[start:end]),
            )
        )
    return tuple(found)


def name_cards(found: tuple[Card, ...], lspci: str) -> tuple[Card, ...]:
    """Return the cards with the names that `lspci -nn -D` has for them."""
    names = {card.address: card.name for card in parse_lspci(lspci)}
    return tuple(replace(card, name=names.get(card.address, card.name)) for card in found)


def in_container() -> bool:
    """Whether this is a container: the bus then also shows cards that are not assigned to it."""
    return any(Path(mark).exists() for mark in _CONTAINER_MARKS)


def _short_name(text: str) -> str:
    """Return the card's common name: the last bracket of pci.ids' name, if it has one."""
    brackets = re.findall(r"\[([^\]]+)\]", text)
    product = [name for name in brackets if name != "AMD/ATI"]
    return product[-1] if product else text


def _read_driver(folder: Path) -> str:
    try:
        return (folder / "driver").readlink().name
    except OSError:
        return ""


def _render_node(folder: Path) -> str:
    try:
        nodes = sorted(node.name for node in (folder / "drm").glob("renderD*"))
    except OSError:
        return ""
    return f"/dev/dri/{nodes[0]}" if nodes else ""
