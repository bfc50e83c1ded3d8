"""PCI devices in Linux's files: a GPU's address and the free part of its own memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from trainer.system import nvidia_smi
from trainer.system.kernel_files import read_number

DEVICES = Path("/sys/bus/pci/devices")
_ADDRESS = re.compile(r"(?:[0-9a-f]{0,4}([0-9a-f]{4}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", re.I)


def normalize_address(text: str) -> str | None:
    """Return a PCI address of any domain width as `0000:0b:00.0`; None if it is not one.

    >>> normalize_address("00000000:0B:00.0")
    '0000:0b:00.0'
    """
    match = _ADDRESS.fullmatch(text)
    return f"{match[1] or '0000'}:{match[2]}".lower() if match else None


def find_addresses(vendor: int, device: int, root: Path = DEVICES) -> list[str]:
    """Return the addresses of devices with these ids, in order."""
    return sorted(
        folder.name
        for folder in root.glob("*")
        if (read_number(folder / "vendor"), read_number(folder / "device")) == (vendor, device)
    )


def free_memory(address: str, root: Path = DEVICES) -> int | None:
    """Return the free bytes of a card's own memory; None if neither driver nor tool reports it.

    amdgpu reports it in files, NVIDIA's driver through nvidia-smi, Intel's and nouveau do not.
    """
    total = read_number(root / address / "mem_info_vram_total")
    used = read_number(root / address / "mem_info_vram_used")
    if total is not None and used is not None:
        return total - used
    return next(
        (
            nvidia_smi.parse_mebibytes(card["memory.free"])
            for card in _ask_nvidia()
            if normalize_address(card["pci.bus_id"]) == address
        ),
        None,
    )


def largest_free_memory(root: Path = DEVICES) -> int | None:
    """Return the free bytes of the GPU with most memory of its own; None if not reported."""
    gpus = (
        folder.name for folder in root.glob("*") if (read_number(folder / "class") or 0) >> 16 == 3
    )
    return max(filter(None, (free_memory(address, root) for address in gpus)), default=None)


def _ask_nvidia() -> list[dict[str, str]]:
    fields = ("pci.bus_id", "memory.free")
    try:
        done = subprocess.run(
            nvidia_smi.query_command(*fields),
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return nvidia_smi.parse_output(done.stdout, *fields)[0] if done.returncode == 0 else []
