"""The devices of this machine: NVIDIA GPUs as nvidia-smi names them, Vulkan's GPUs, and the CPU.

A card that exists but cannot be used is a problem to report, never "zero GPUs". `pci.py` lists
the cards on the bus, `vulkan.py` those that Vulkan shows. Standard library only: it runs on
every host.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.inventory.facts import vulkan
from launcher.inventory.facts.pci import (
    NVIDIA,
    PCI_DEVICES,
    Card,
    in_container,
    name_cards,
    normal_address,
    read_cards,
)
from launcher.inventory.facts.vulkan import Adapter
from trainer.system import cgroups, nvidia_smi
from trainer.system.backends import BACKENDS, Backend
from trainer.system.kernel_files import read_content

FIELDS = ("uuid", "pci.bus_id", "name", "memory.total")
"""Fields queried from nvidia-smi; the nvidia role queries the same."""


@dataclass(frozen=True)
class Device:
    """One GPU, or the CPU, of a host; a worker trains on one, or on those of a replica group."""

    backend: Backend
    id: str
    """UUID (cuda) or PCI address (wgpu); a software's driver (`llvmpipe`); `cpu` for the CPU."""
    name: str = ""
    memory: int | None = None
    """Bytes of device memory; None when the device does not report it."""
    threads: int | None = None
    """Threads of a CPU worker when the inventory fixes them."""
    pci: str = ""
    """PCI address as `0000:0b:00.0`, where known."""
    group: int | None = None
    """The replica group of its host, by number, that it belongs to; None: a worker of its own."""
    strategy: str = ""
    """How that group holds its replica."""
    kind: str = ""
    """Vulkan's type of a wgpu device: discrete, integrated, virtual or software."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is one of the host's GPUs; else the CPU."""
        return BACKENDS[self.backend].is_gpu

    def answers_to(self, identity: str) -> bool:
        """Whether this is the device that the inventory names by UUID or PCI address."""
        wanted = identity.lower()
        return wanted == self.id.lower() or (self.pci != "" and wanted == self.pci)


_DEVICE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""A UUID, a PCI address, or a name: it becomes part of a process's command on that host."""


@dataclass(frozen=True)
class Detection:
    """Usable devices, and present but unusable ones (one line each, with a remedy)."""

    devices: tuple[Device, ...]
    """Devices of `motley_devices: auto`: CUDA GPUs and Vulkan's discrete ones, else the CPU."""
    problems: tuple[str, ...] = ()
    """Cards that auto would train on, if they worked. They prevent a start."""
    vulkan: tuple[Device, ...] = ()
    """wgpu devices, discrete ones first; an inventory may list any of them."""
    vulkan_problems: tuple[str, ...] = ()
    """Cards that Vulkan lacks, although it could show them. A start fails only if one is listed."""
    cards: tuple[Card, ...] = ()
    """The graphics cards on the bus, usable or not."""
    adapters: tuple[Adapter, ...] = ()
    """All that Vulkan shows, software included; empty where it is not queried."""

    def __post_init__(self) -> None:
        for device in (*self.devices, *self.vulkan):
            if not _DEVICE_ID.fullmatch(device.id):
                raise ValueError(f"{device.id!r} is not a device id")


Runner = Callable[[Sequence[str]], "tuple[int, str]"]
"""Runs a command and returns its exit code and output; 127 when it is not installed."""


def detect_devices(
    run: Runner | None = None, pci: Path = PCI_DEVICES, *, allow_software: bool = False
) -> Detection:
    """Return this machine's GPUs; the CPU only where there is none of its own memory.

    `allow_software` counts a software Vulkan device (llvmpipe) as one, for tests without a GPU.
    """
    run = run or run_command
    found_cards = read_cards(pci)
    if found_cards:
        found_cards = name_cards(found_cards, run(["lspci", "-nn", "-D"])[1])
    nvidia = [card for card in found_cards if card.vendor == NVIDIA]
    others = tuple(card for card in found_cards if card.vendor != NVIDIA)
    cuda = detect_cuda(nvidia, *run(nvidia_smi.query_command(*FIELDS)), confined=in_container())
    adapters, problems = _detect_vulkan(run, others, allow_software)
    usable = vulkan.select_usable(adapters, allow_software)
    shown = tuple(_wgpu_device(adapter, others) for adapter in usable)
    fallback = (Device("cpu", "cpu", cpu_name(), None),)
    # An integrated GPU shares memory and power with the CPU: it is used only if it is listed.
    gpus = (*cuda.devices, *(device for device in shown if device.kind == "discrete"))
    devices = gpus if gpus or cuda.problems else fallback
    return Detection(devices, cuda.problems, shown, problems, found_cards, adapters)


def detect_cuda(
    nvidia: Sequence[Card], code: int, output: str, *, confined: bool = False
) -> Detection:
    """Return the CUDA devices, and a problem when fewer answer than there are on the bus.

    `code` and `output` are those of a query of `FIELDS`; `confined`: this is a container, whose bus
    also shows cards that are not assigned to it.
    """
    found = parse_nvidia_smi(output) if code == 0 else Detection(())
    problems = list(found.problems)
    seen = len(found.devices) + len(found.problems)
    if seen < len(nvidia) and not (code == 127 and confined):
        problems.append(_missing_driver(nvidia, code, output, seen))
    return Detection(found.devices, tuple(problems))


def _detect_vulkan(
    run: Runner, others: tuple[Card, ...], allow_software: bool
) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """Query Vulkan if there is a card for it or software is allowed."""
    if not others and not allow_software:
        return (), ()
    code, output = run(["vulkaninfo", "--summary"])
    adapters = vulkan.locate_adapters(vulkan.parse_vulkaninfo(output), others)
    if any(adapter.is_gpu and not adapter.pci for adapter in adapters):
        whole = vulkan.parse_vulkaninfo(run(["vulkaninfo"])[1])
        if [adapter.uuid for adapter in whole] == [adapter.uuid for adapter in adapters]:
            adapters = vulkan.locate_adapters(whole, others)
    seen = {adapter.pci for adapter in adapters}
    problems = tuple(
        vulkan.explain_missing(card, code, output, _is_accessible(card), _user_name())
        for card in others
        if card.address not in seen and (card.node or not in_container())
    )
    return adapters, problems


def _wgpu_device(adapter: vulkan.Adapter, others: Sequence[Card]) -> Device:
    memory = next((card.memory for card in others if card.address == adapter.pci), None)
    # SwiftShader's driver is called `SwiftShader driver`; a trainer finds a device by its name.
    name = adapter.driver.partition(" ")[0] if adapter.kind == "software" else adapter.uuid
    return Device(
        "wgpu", adapter.pci or name, adapter.name, memory, pci=adapter.pci, kind=adapter.kind
    )


def _is_accessible(card: Card) -> bool:
    return os.access(card.node, os.R_OK | os.W_OK)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def parse_nvidia_smi(output: str) -> Detection:
    """Read the answer to a query of `FIELDS`; without a memory's size a card is still one."""
    found, others = nvidia_smi.parse_output(output, *FIELDS)
    devices = (
        Device(
            "cuda",
            card["uuid"],
            card["name"],
            nvidia_smi.parse_mebibytes(card["memory.total"]),
            pci=normal_address(card["pci.bus_id"]),
        )
        for card in found
    )
    problems = (
        f"nvidia-smi reports a card it cannot use: {line}"
        for line in others
        if not line.startswith("No devices")
    )
    return Detection(tuple(devices), tuple(problems))


def usable_cores() -> int:
    """Return the cores this process may use: affinity mask and container quota included."""
    return cgroups.count_processors(len(os.sched_getaffinity(0)))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes of main memory that this process can still take; None when unknown."""
    free = _total_memory("MemAvailable", meminfo)
    return None if free is None else cgroups.free_memory(free)


def main_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the bytes of main memory that this process may have; None when unknown."""
    total = _total_memory("MemTotal", meminfo)
    return None if total is None else cgroups.memory_limit(total)


def _total_memory(kind: str, meminfo: Path) -> int | None:
    for line in read_content(meminfo).splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return None


def cpu_name() -> str:
    """Return the processor's model name, or `CPU`."""
    for line in read_content(Path("/proc/cpuinfo")).splitlines():
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


def _missing_driver(nvidia: Sequence[Card], code: int, output: str, seen: int) -> str:
    where = ", ".join(card.address for card in nvidia)
    if code == 127:
        reason = "no driver is installed (nvidia-smi is missing)"
    elif code == 0:
        reason = f"nvidia-smi lists {seen} of {len(nvidia)}"
    else:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        reason = lines[0] if lines else f"nvidia-smi exited with code {code}"
    return f"NVIDIA card at {where} cannot be used: {reason}"
