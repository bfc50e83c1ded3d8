"""The current readings of a host's devices: memory in use, temperature, load.

Read every few seconds during `status --watch`, so it is cheap and quick: sysfs, /proc and at most
one nvidia-smi. A reading that a device does not offer is None. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.inventory.facts.devices import Runner, available_memory, main_memory, run_command
from launcher.inventory.facts.pci import AMD, PCI_DEVICES, normal_address, read_cards
from trainer.system import nvidia_smi
from trainer.system.kernel_files import read_content, read_number

FIELDS = (
    *("uuid", "pci.bus_id"),
    *("memory.used", "memory.total", "temperature.gpu", "utilization.gpu", "power.draw"),
)
"""Fields queried from nvidia-smi."""

HWMON = Path("/sys/class/hwmon")
MEMINFO = Path("/proc/meminfo")

_CPU_SENSORS = ("k10temp", "coretemp", "zenpower", "cpu_thermal")


@dataclass(frozen=True)
class Gauge:
    """One device. Bytes, degrees Celsius, percent, watts."""

    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    load: int | None = None
    power: float | None = None


def read_gauges(
    run: Runner | None = None, pci: Path = PCI_DEVICES, hwmon: Path = HWMON, meminfo: Path = MEMINFO
) -> dict[str, Gauge]:
    """Return the devices by their names in an inventory: UUID, PCI address, `cpu`."""
    run = run or run_command
    found = {"cpu": _read_cpu(hwmon, meminfo)}
    code, output = run(nvidia_smi.query_command(*FIELDS))
    if code == 0:
        found |= parse_nvidia_gauges(output)
    for card in read_cards(pci):
        if card.vendor == AMD:
            found[card.address] = _read_amd(pci / card.address)
    return found


def parse_nvidia_gauges(output: str) -> dict[str, Gauge]:
    """Return the cards by UUID and by PCI address."""
    found: dict[str, Gauge] = {}
    for card in nvidia_smi.parse_output(output, *FIELDS)[0]:
        temperature = nvidia_smi.parse_integer(card["temperature.gpu"])
        gauge = Gauge(
            memory_used=nvidia_smi.parse_mebibytes(card["memory.used"]),
            memory_total=nvidia_smi.parse_mebibytes(card["memory.total"]),
            temperature=None if temperature is None else float(temperature),
            load=nvidia_smi.parse_integer(card["utilization.gpu"]),
            power=nvidia_smi.parse_decimal(card["power.draw"]),
        )
        found |= {card["uuid"]: gauge, normal_address(card["pci.bus_id"]): gauge}
    return found


def _read_amd(device: Path) -> Gauge:
    return Gauge(
        memory_used=read_number(device / "mem_info_vram_used"),
        memory_total=read_number(device / "mem_info_vram_total"),
        temperature=_read_temperature(device / "hwmon"),
        load=read_number(device / "gpu_busy_percent"),
        power=_read_power(device / "hwmon"),
    )


def _read_cpu(hwmon: Path, meminfo: Path) -> Gauge:
    total, free = main_memory(meminfo), available_memory(meminfo)
    used = None if total is None or free is None else total - free
    return Gauge(used, total, _read_temperature(hwmon, _CPU_SENSORS))


def _read_power(folder: Path) -> float | None:
    """Return the first sensor's value; hwmon gives millionths of a watt."""
    for sensor in sorted(folder.glob("*")):
        for name in ("power1_average", "power1_input"):
            value = read_number(sensor / name)
            if value is not None:
                return value / 1e6
    return None


def _read_temperature(folder: Path, sensors: tuple[str, ...] = ()) -> float | None:
    """Return the first sensor's value; hwmon gives thousandths of a degree."""
    for sensor in sorted(folder.glob("*")):
        if not sensors or read_content(sensor / "name") in sensors:
            value = read_number(sensor / "temp1_input")
            if value is not None:
                return value / 1000.0
    return None
