"""Device detection over recorded outputs: a card that is there but unusable is never zero GPUs."""

from pathlib import Path

import pytest

from launcher.devices import (
    Detection,
    Device,
    available_memory,
    detect,
    normal_pci,
    nvidia_cards,
    parse_nvidia_smi,
    usable_cores,
)

RTX_4090 = (
    "GPU-6f1e5a0c-7d1b-0d2a-9f7e-1d1f3c1b2a3d, 00000000:01:00.0, NVIDIA GeForce RTX 4090, 24564"
)
H200 = "GPU-11111111-2222-3333-4444-555555555555, 00000000:41:00.0, NVIDIA H200, 143771"
SHARED_MEMORY = "GPU-aaaaaaaa-2222-3333-4444-555555555555, 0000000F:01:00.0, NVIDIA GB10, [N/A]"
DRIVER_MISSING = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running.\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\n"


def bus(folder: Path, *cards: tuple[str, str, str]) -> Path:
    """Make a /sys/bus/pci/devices of (address, vendor, class)."""
    for address, vendor, kind in cards:
        (folder / address).mkdir(parents=True)
        (folder / address / "vendor").write_text(f"{vendor}\n")
        (folder / address / "class").write_text(f"{kind}\n")
    return folder


def test_a_card_is_named_by_uuid_with_memory_in_bytes_and_pci_address() -> None:
    (device,) = parse_nvidia_smi(RTX_4090 + "\n").devices
    assert device.id == "GPU-6f1e5a0c-7d1b-0d2a-9f7e-1d1f3c1b2a3d"
    assert device.memory == 24564 << 20
    assert device.pci == "0000:01:00.0"
    assert device.answers_to("0000:01:00.0")
    assert device.answers_to(device.id.upper())
    assert not device.answers_to("0000:02:00.0")


def test_memory_that_is_not_available_does_not_hide_the_card() -> None:
    found = parse_nvidia_smi(f"{H200}\n{SHARED_MEMORY}\n")
    assert [device.memory for device in found.devices] == [143771 << 20, None]
    assert found.devices[1].pci == "000f:01:00.0"
    assert found.problems == ()


def test_an_unreadable_card_is_a_problem() -> None:
    found = parse_nvidia_smi(f"{H200}\n[Unknown Error], 00000000:42:00.0, NVIDIA H200, 1\n")
    assert len(found.devices) == 1
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    ("code", "output", "reason"),
    [
        (9, DRIVER_MISSING, "couldn't communicate"),
        (18, MISMATCH, "version mismatch"),
        (0, "No devices were found\n", "lists 0 of 1"),
        (124, "nvidia-smi: no answer within 20 s", "no answer"),
    ],
)
def test_a_card_without_a_working_driver_is_an_error_not_zero_gpus(
    tmp_path: Path, code: int, output: str, reason: str
) -> None:
    pci = bus(tmp_path / "pci", ("0000:01:00.0", "0x10de", "0x030000"))
    found = detect(lambda _: (code, output), pci)
    assert found.devices == ()
    assert "0000:01:00.0" in found.problems[0]
    assert reason in found.problems[0]


def test_one_of_two_cards_missing_is_said_and_the_other_is_kept(tmp_path: Path) -> None:
    pci = bus(
        tmp_path / "pci",
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:02:00.0", "0x10de", "0x030200"),
    )
    found = detect(lambda _: (0, RTX_4090), pci)
    assert [device.backend for device in found.devices] == ["cuda"]
    assert "lists 1 of 2" in found.problems[0]


def test_sound_functions_and_other_vendors_are_no_nvidia_gpus(tmp_path: Path) -> None:
    pci = bus(
        tmp_path / "pci",
        ("0000:00:02.0", "0x8086", "0x030000"),
        ("0000:01:00.1", "0x10de", "0x040300"),
        ("0000:0b:00.0", "0x1002", "0x030000"),
    )
    assert nvidia_cards(pci) == []
    found = detect(lambda _: (127, ""), pci)
    assert [device.backend for device in found.devices] == ["cpu"]
    assert found.problems == ()


def test_without_any_card_the_cpu_is_the_device(tmp_path: Path) -> None:
    found = detect(lambda _: (127, ""), tmp_path / "none")
    assert [(device.backend, device.id) for device in found.devices] == [("cpu", "cpu")]


def test_gpus_without_a_pci_bus_are_found(tmp_path: Path) -> None:
    """WSL 2 shows no PCI bus, and nvidia-smi works."""
    found = detect(lambda _: (0, RTX_4090), tmp_path / "none")
    assert isinstance(found, Detection)
    assert [device.backend for device in found.devices] == ["cuda"]


def test_a_cpu_answers_to_its_id_alone() -> None:
    assert not Device("cpu", "cpu").answers_to("")
    assert normal_pci("00000000:0B:00.0") == "0000:0b:00.0"


@pytest.mark.parametrize(("text", "most"), [("150000 100000", 2), ("10000 100000", 1)])
def test_a_container_quota_limits_the_cores(tmp_path: Path, text: str, most: int) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert 1 <= usable_cores(tmp_path / "cpu.max") <= most


def test_no_quota_leaves_the_affinity(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000")
    assert usable_cores(tmp_path / "cpu.max") == usable_cores(tmp_path / "absent")


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:    4 kB\n")
    assert available_memory(tmp_path / "meminfo") == 4096
    assert available_memory(tmp_path / "absent") is None
