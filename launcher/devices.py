"""The devices of this machine: NVIDIA GPUs as nvidia-smi names them, and the CPU.

A card that is there but cannot be used is a problem to report, never "zero GPUs".
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Backend = Literal["cuda", "wgpu", "cpu"]

PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers (PCI class codes)
_QUERY = "uuid,pci.bus_id,name,memory.total"
_MIB = 1 << 20
_CONTAINER_MARKS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU, of a host; a worker trains on one."""

    backend: Backend
    id: str
    """UUID (cuda) or PCI address; `cpu` for the CPU."""
    name: str = ""
    memory: int | None = None
    """Bytes of device memory; None when the device does not say."""
    threads: int | None = None
    """Threads of a CPU worker when the inventory fixes them."""
    pci: str = ""
    """PCI address as `0000:0b:00.0`, where known."""

    def answers_to(self, identity: str) -> bool:
        """Whether this is the device that the inventory names by UUID or PCI address."""
        wanted = identity.lower()
        return wanted == self.id.lower() or (self.pci != "" and wanted == self.pci)


@dataclass(frozen=True)
class Detection:
    """What was found, and what is there but unusable (one line each, with a remedy)."""

    devices: tuple[Device, ...]
    problems: tuple[str, ...] = ()


Runner = Callable[[Sequence[str]], "tuple[int, str]"]
"""Runs a command and returns its exit code and output; 127 when it is not installed."""


def detect(run: Runner | None = None, pci: Path = PCI_DEVICES) -> Detection:
    """Return this machine's GPUs; the CPU only where there is no GPU at all."""
    cards = nvidia_cards(pci)
    code, output = (run or run_command)(
        ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    )
    found = parse_nvidia_smi(output) if code == 0 else Detection(())
    problems = list(found.problems)
    seen = len(found.devices) + len(found.problems)
    if seen < len(cards) and not (code == 127 and in_container()):
        problems.append(_missing_driver(cards, code, output, seen))
    if found.devices or problems:
        return Detection(found.devices, tuple(problems))
    return Detection((Device("cpu", "cpu", cpu_name(), None),))


def parse_nvidia_smi(output: str) -> Detection:
    """Read the CSV (no header, no units) of `nvidia-smi --query-gpu=` with the fields above.

    Memory comes in MiB; `[N/A]` (shared-memory boards) is no number and no reason to drop a card.
    """
    devices: list[Device] = []
    problems: list[str] = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].startswith("GPU-"):
            if line.strip() and not line.startswith("No devices"):
                problems.append(f"nvidia-smi reports a card it cannot use: {line.strip()}")
            continue
        uuid, bus, name, memory = fields
        size = int(memory) * _MIB if memory.isdigit() else None
        devices.append(Device("cuda", uuid, name, size, pci=normal_pci(bus)))
    return Detection(tuple(devices), tuple(problems))


def normal_pci(address: str) -> str:
    """Return the kernel's spelling of a PCI address; NVIDIA pads the domain to 8 digits."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def nvidia_cards(pci: Path = PCI_DEVICES) -> list[str]:
    """Return the PCI addresses of the NVIDIA GPUs, whether or not a driver is loaded."""
    if not pci.is_dir():
        return []
    return sorted(
        device.name
        for device in pci.iterdir()
        if _read(device / "vendor") == _NVIDIA
        and _read(device / "class").startswith(_DISPLAY_CLASSES)
    )


def in_container() -> bool:
    """Whether this is a container: the bus then also shows cards that were not handed to it."""
    return any(Path(mark).exists() for mark in _CONTAINER_MARKS)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores this process may use: affinity mask and container quota included."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(cgroup).partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes of main memory that programs can still take; None when unknown."""
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name, or `CPU`."""
    for line in _read(cpuinfo).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def run_command(argv: Sequence[str]) -> tuple[int, str]:
    """Run a short query with a deadline; its output is stdout and stderr together."""
    if shutil.which(argv[0]) is None:
        return 127, f"{argv[0]}: not installed"
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=20,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"{argv[0]}: no answer within 20 s"
    except OSError as error:
        return 126, f"{argv[0]}: {error.strerror}"
    return done.returncode, done.stdout


def _missing_driver(cards: Sequence[str], code: int, output: str, seen: int) -> str:
    where = ", ".join(cards)
    if code == 127:
        reason = "no driver is installed (nvidia-smi is missing)"
    elif code == 0:
        reason = f"nvidia-smi lists {seen} of {len(cards)}"
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        reason = lines[0] if lines else f"nvidia-smi ended with code {code}"
    return f"NVIDIA card at {where} cannot be used: {reason}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
