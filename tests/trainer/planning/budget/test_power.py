"""Power as a host's files tell it; the trees are written by hand in the form of real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.clock import Clock
from trainer.planning.budget.power import PowerMeter

JOULE = 1_000_000


class Tree:
    """Two packages with memory, as powercap shows them, and sensors as hwmon shows them."""

    def __init__(self, root: Path) -> None:
        self.powercap, self.hwmon = root / "powercap", root / "hwmon"
        self.cards = root / "nvidia"
        self.clock = Clock(100.0)
        for folder in (self.powercap, self.hwmon, self.cards):
            folder.mkdir()

    def zone(self, name: str, kind: str, microjoules: int, most: int = 262143 * JOULE) -> None:
        folder = self.powercap / name
        folder.mkdir(exist_ok=True)
        files = (("name", kind), ("energy_uj", microjoules), ("max_energy_range_uj", most))
        for file, value in files:
            (folder / file).write_text(f"{value}\n")

    def sensor(self, number: int, driver: str, **readings: int) -> None:
        folder = self.hwmon / f"hwmon{number}"
        folder.mkdir(exist_ok=True)
        (folder / "name").write_text(f"{driver}\n")
        for reading, value in readings.items():
            (folder / reading).write_text(f"{value}\n")

    def meter(self, nvml: Any = None) -> PowerMeter:
        return PowerMeter(self.powercap, self.hwmon, self.cards, nvml, self.clock)


class Nvml:
    """NVML's answers for cards whose energy is set; None: the card has no counter."""

    def __init__(self, *millijoules: int | None) -> None:
        self.millijoules: list[int | None] = list(millijoules)

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.millijoules)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:  # noqa: N802
        value = self.millijoules[card]
        if value is None:
            raise RuntimeError("Not Supported")
        return value


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def server(tree: Tree) -> Tree:
    tree.zone("intel-rapl:0", "package-0", 5 * JOULE)
    tree.zone("intel-rapl:0:0", "dram", 1 * JOULE)
    tree.zone("intel-rapl:0:1", "core", 1 * JOULE)
    tree.zone("intel-rapl-mmio:0", "package-0", 5 * JOULE)
    return tree


def test_a_machine_that_says_nothing(tree: Tree) -> None:
    meter = tree.meter()
    for _ in range(3):
        tree.clock.now += 5
        assert meter.measure_watts() is None


def test_packages_and_memory_but_no_part_twice(server: Tree) -> None:
    meter = server.meter()
    assert meter.measure_watts() is None, "a counter needs two readings"
    server.clock.now += 10
    server.zone("intel-rapl:0", "package-0", 805 * JOULE)
    server.zone("intel-rapl:0:0", "dram", 101 * JOULE)
    server.zone("intel-rapl:0:1", "core", 700 * JOULE)
    assert meter.measure_watts() == pytest.approx(90.0)


def test_a_counter_that_begins_again(server: Tree) -> None:
    most = 262143 * JOULE
    server.zone("intel-rapl:0", "package-0", most - 100 * JOULE)
    meter = server.meter()
    meter.measure_watts()
    server.clock.now += 10
    server.zone("intel-rapl:0", "package-0", 400 * JOULE)
    assert meter.measure_watts() == pytest.approx(50.0)


def test_counters_that_only_root_may_read_are_no_zero(server: Tree) -> None:
    meter = server.meter()
    meter.measure_watts()
    server.clock.now += 10
    (server.powercap / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.measure_watts() is None


def test_nvidia_cards_count(server: Tree) -> None:
    (server.cards / "0000:01:00.0").mkdir()
    nvml = Nvml(1_000, 2_000)
    meter = server.meter(nvml)
    meter.measure_watts()
    server.clock.now += 10
    server.zone("intel-rapl:0", "package-0", 405 * JOULE)
    nvml.millijoules = [3_001_000, 2_002_000]
    assert meter.measure_watts() == pytest.approx(40 + 300 + 200)


@pytest.mark.parametrize("nvml", [Nvml(1_000, None), object()])
def test_a_card_that_says_nothing_makes_the_whole_unknown(server: Tree, nvml: Any) -> None:
    """Else a host with eight cards would be billed as its processor alone."""
    (server.cards / "0000:01:00.0").mkdir()
    meter = server.meter(nvml)
    for _ in range(2):
        server.clock.now += 10
        assert meter.measure_watts() is None


def test_amd_cards_count(server: Tree) -> None:
    server.sensor(0, "k10temp", temp1_input=45_000)
    server.sensor(1, "amdgpu", power1_average=60 * JOULE)
    server.sensor(2, "amdgpu", power1_input=30 * JOULE)
    meter = server.meter()
    meter.measure_watts()
    server.clock.now += 10
    assert meter.measure_watts() == pytest.approx(90.0)


def test_a_sensor_of_the_whole_host_is_taken_alone(server: Tree) -> None:
    server.sensor(0, "power_meter", power1_average=412 * JOULE)
    server.sensor(1, "amdgpu", power1_average=60 * JOULE)
    assert server.meter().measure_watts() == pytest.approx(412.0)


def test_this_machine_answers() -> None:
    """Whatever it has: a number above zero, or nothing; never an error."""
    meter = PowerMeter()
    for _ in range(2):
        watts = meter.measure_watts()
        assert watts is None or watts >= 0
