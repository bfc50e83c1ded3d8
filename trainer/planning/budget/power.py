"""Measure the power of this host, if possible: RAPL, NVIDIA's driver, hwmon.

A sensor of the whole host is used alone. Otherwise the power is the sum of the processors (RAPL:
packages and memory) and of every card (NVML's energy counter, amdgpu's hwmon), and only if all of
them can be read: a part would be taken for the whole. Power supplies and cooling are not included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.system.kernel_files import read_content, read_number

MEASURE_EVERY = 5.0
"""Seconds: counters tell a mean, and sensors change slowly."""
POWERCAP = Path("/sys/class/powercap")
HWMON = Path("/sys/class/hwmon")
NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")
"""Has an entry for each card that NVIDIA's driver runs."""
_WHOLE_HOST = "power_meter"
"""ACPI's power meter: of the power supplies."""


class PowerMeter:
    """Measures this host between two calls. Not thread-safe."""

    def __init__(
        self,
        powercap: Path = POWERCAP,
        hwmon: Path = HWMON,
        nvidia_cards: Path = NVIDIA_CARDS,
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`nvml` is the module pynvml, imported if there are such cards and None is given."""
        self._powercap = powercap
        self._hwmon = hwmon
        self._clock = clock
        self._nvml: Any = None
        self._cards: list[Any] = []
        self._blind = False
        """Whether there are cards whose power nothing tells."""
        self._at: float | None = None
        self._asked = -math.inf
        self._recent: float | None = None
        self._counters: dict[str, tuple[float, float | None]] = {}
        if nvidia_cards.is_dir() and any(nvidia_cards.iterdir()):
            self._open_nvml(nvml)

    def _open_nvml(self, nvml: Any) -> None:
        try:
            if nvml is None:
                import pynvml as nvml  # pyright: ignore[reportMissingImports] - optional
            self._nvml = nvml
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._cards = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        except Exception:  # no library, no driver, or no permission: NVML has an error for each
            self._blind = True

    def measure_watts(self) -> float | None:
        """Return the mean power since the last call; None: nothing, or only a part, is measured.

        The first call begins, and returns None where only counters tell.
        """
        now, before = self._clock(), self._at
        if (whole := self._read_sensors(_WHOLE_HOST)) is not None:
            return whole
        counters, drawn = self._read_energies(), self._read_sensors("amdgpu") or 0.0
        last, self._counters, self._at = self._counters, counters, now
        if self._blind or before is None or now <= before or counters.keys() != last.keys():
            return None
        if not any(name.startswith("rapl ") for name in counters):
            return None
        joules = 0.0
        for name, (value, most) in counters.items():
            grown = value - last[name][0]
            joules += grown + most if grown < 0 and most is not None else max(0.0, grown)
        return drawn + joules / (now - before)

    def recent_watts(self) -> float | None:
        """Return the power as it was measured at most five seconds ago."""
        if self._clock() - self._asked >= MEASURE_EVERY:
            self._asked = self._clock()
            self._recent = self.measure_watts()
        return self._recent

    def _read_energies(self) -> dict[str, tuple[float, float | None]]:
        """Return the counters in joules, each with the value at which it begins again."""
        found: dict[str, tuple[float, float | None]] = {}
        for zone in sorted(self._powercap.glob("intel-rapl:*")):  # AMD's processors have them too
            name = read_content(zone / "name")
            if name.startswith("package-") or name == "dram":
                value = read_number(zone / "energy_uj")  # its owner alone may read it
                most = read_number(zone / "max_energy_range_uj")
                if value is None:
                    return {}
                found[f"rapl {zone.name}"] = value / 1e6, None if most is None else most / 1e6
        for place, card in enumerate(self._cards):
            try:
                millijoules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(card)
            except Exception:  # a card before Volta counts none, or was lost
                return {}
            found[f"nvidia {place}"] = millijoules / 1e3, None
        return found

    def _read_sensors(self, driver: str) -> float | None:
        """Return the sum of a driver's power sensors in watts; None without any."""
        values: list[float] = []
        for sensor in sorted(self._hwmon.glob("hwmon*")):
            if read_content(sensor / "name") == driver:
                for reading in ("power1_average", "power1_input"):
                    if (value := read_number(sensor / reading)) is not None:
                        values.append(value / 1e6)
                        break
        return sum(values) if values else None
