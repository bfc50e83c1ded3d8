"""PCI devices as Linux shows them: where a GPU sits and how much of its own memory is free."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"(?:[0-9a-f]{0,4}([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.I)
_MIB = 1 << 20


def address_of(text: str) -> str | None:
    """Return a PCI address as `0000:0b:00.0`, given with any width of domain; None if it is none.

    >>> address_of("00000000:0B:00.0")
    '0000:0b:00.0'
    """
    match = _ADDRESS.fullmatch(text)
    return f"{match[1] or '0000'}:{match[2]}".lower() if match else None


def addresses(vendor: int, device: int, root: Path = DEVICES) -> list[str]:
    """Return where devices with these ids sit, in order."""
    return sorted(
        folder.name
        for folder in root.glob("*")
        if (_number(folder / "vendor"), _number(folder / "device")) == (vendor, device)
    )


def free_memory(address: str, root: Path = DEVICES) -> int | None:
    """Return the free bytes of a card's own memory; None where neither driver nor tool tells.

    amdgpu tells in files, NVIDIA's driver through nvidia-smi, Intel's and nouveau not at all.
    """
    total = _number(root / address / "mem_info_vram_total")
    used = _number(root / address / "mem_info_vram_used")
    if total is not None and used is not None:
        return total - used
    for line in _ask_nvidia():
        place, _, free = line.partition(",")
        if address_of(place.strip()) == address and free.strip().isdecimal():
            return int(free) * _MIB
    return None


def largest_card(root: Path = DEVICES) -> int | None:
    """Return the free bytes of the GPU with most memory of its own; None where nothing tells."""
    gpus = (folder.name for folder in root.glob("*") if (_number(folder / "class") or 0) >> 16 == 3)
    return max(filter(None, (free_memory(address, root) for address in gpus)), default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(), 0)
    except (OSError, ValueError):
        return None


def _ask_nvidia() -> list[str]:
    query = ["--query-gpu=pci.bus_id,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query],  # noqa: S607  # where it lies differs between systems
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
