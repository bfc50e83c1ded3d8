"""The current readings of a host's devices: memory in use, temperature, load.

Read every few seconds during `status --watch`, so it is cheap and quick: sysfs, /proc and at most
one nvidia-smi. A reading that a device does not offer is None. Standard library only.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from launcher.facts.devices import Runner, run_command
from launcher.facts.pci import AMD, PCI_DEVICES, cards, normal_address

QUERY = "uuid,pci.bus_id,memory.used,memory.total,temperature.gpu,utilization.gpu"
"""The fields of the nvidia-smi query, in this order."""

HWMON = Path("/sys/class/hwmon")
MEMINFO = Path("/proc/meminfo")

_CPU_SENSORS = ("k10temp", "coretemp", "zenpower", "cpu_thermal")
_MIB = 1 << 20


@dataclass(frozen=True)
class Gauge:
    """One device. Bytes, degrees Celsius, percent."""

    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    load: int | None = None


def read_gauges(
    run: Runner | None = None,
    pci: Path = PCI_DEVICES,
    hwmon: Path = HWMON,
    meminfo: Path = MEMINFO,
) -> dict[str, Gauge]:
    """Return the devices by their names in an inventory: UUID, PCI address, `cpu`."""
    run = run or run_command
    found = {"cpu": _cpu(hwmon, meminfo)}
    code, output = run(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"])
    if code == 0:
        found |= parse_nvidia_gauges(output)
    for card in cards(pci):
        if card.vendor == AMD:
            found[card.address] = _amd(pci / card.address)
    return found


def parse_nvidia_gauges(output: str) -> dict[str, Gauge]:
    """Return the cards by UUID and by PCI address; `[N/A]` is None."""
    found: dict[str, Gauge] = {}
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not fields[0].startswith("GPU-"):
            continue
        used, total, temperature, load = (int(f) if f.isdigit() else None for f in fields[2:])
        gauge = Gauge(
            memory_used=None if used is None else used * _MIB,
            memory_total=None if total is None else total * _MIB,
            temperature=None if temperature is None else float(temperature),
            load=load,
        )
        found[fields[0]] = gauge
        found[normal_address(fields[1])] = gauge
    return found


def _amd(device: Path) -> Gauge:
    return Gauge(
        memory_used=_number(device / "mem_info_vram_used"),
        memory_total=_number(device / "mem_info_vram_total"),
        temperature=_temperature(device / "hwmon"),
        load=_number(device / "gpu_busy_percent"),
    )


def _cpu(hwmon: Path, meminfo: Path) -> Gauge:
    sizes: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(rest.split()[0]) * 1024
    total, free = sizes.get("MemTotal"), sizes.get("MemAvailable")
    used = None if total is None or free is None else total - free
    return Gauge(used, total, _temperature(hwmon, _CPU_SENSORS))


def _temperature(folder: Path, sensors: tuple[str, ...] = ()) -> float | None:
    """Return the first sensor's value; hwmon gives thousandths of a degree."""
    with contextlib.suppress(OSError):
        for sensor in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                name = (sensor / "name").read_text(encoding="ascii").strip()
                if not sensors or name in sensors:
                    value = _number(sensor / "temp1_input")
                    if value is not None:
                        return value / 1000.0
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
