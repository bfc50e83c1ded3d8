"""Gauges from recorded nvidia-smi output and from folders like the kernel's."""

from collections.abc import Sequence
from pathlib import Path

from launcher.inventory.facts.gauges import Gauge, parse_nvidia_gauges, read_gauges

NVIDIA = """\
GPU-6f1e0b1c-0000-1111-2222-333344445555, 00000000:01:00.0, 11264, 24564, 67, 98, 312.45
GPU-aaaa, 00000000:02:00.0, [N/A], [N/A], 45, [N/A], [N/A]
No devices were found
"""
GIB = 1 << 30


def test_nvidia() -> None:
    found = parse_nvidia_gauges(NVIDIA)
    first = Gauge(11 * GIB, 24564 << 20, 67.0, 98, 312.45)
    assert found["GPU-6f1e0b1c-0000-1111-2222-333344445555"] == first
    assert found["0000:01:00.0"] == first
    assert found["GPU-aaaa"] == Gauge(None, None, 45.0, None)
    assert len(found) == 4


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_amd_and_the_processor(tmp_path: Path) -> None:
    card = tmp_path / "pci/0000:0b:00.0"
    put(card / "vendor", "0x1002\n")
    put(card / "class", "0x030000\n")
    put(card / "mem_info_vram_used", f"{3 * GIB}\n")
    put(card / "mem_info_vram_total", f"{8 * GIB}\n")
    put(card / "gpu_busy_percent", "77\n")
    put(card / "hwmon/hwmon4/name", "amdgpu\n")
    put(card / "hwmon/hwmon4/temp1_input", "61000\n")
    put(card / "hwmon/hwmon4/power1_average", "143000000\n")
    put(tmp_path / "hwmon/hwmon0/name", "nvme\n")
    put(tmp_path / "hwmon/hwmon0/temp1_input", "30000\n")
    put(tmp_path / "hwmon/hwmon1/name", "k10temp\n")
    put(tmp_path / "hwmon/hwmon1/temp1_input", "55250\n")
    put(tmp_path / "meminfo", "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 262144 kB\n")

    def run(_: Sequence[str]) -> tuple[int, str]:
        return 127, "nvidia-smi: not installed"

    found = read_gauges(run, tmp_path / "pci", tmp_path / "hwmon", tmp_path / "meminfo")
    assert found == {
        "cpu": Gauge(3 * GIB // 4, GIB, 55.25),
        "0000:0b:00.0": Gauge(3 * GIB, 8 * GIB, 61.0, 77, 143.0),
    }


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    def run(_: Sequence[str]) -> tuple[int, str]:
        return 9, "Failed to initialize NVML"

    assert read_gauges(run, tmp_path / "x", tmp_path / "x", tmp_path / "x") == {"cpu": Gauge()}


def test_this_machine() -> None:
    assert read_gauges()["cpu"].memory_total
