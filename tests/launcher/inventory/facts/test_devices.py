"""Device detection over recorded outputs: a card that is there but unusable is never zero GPUs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.inventory.facts.devices import (
    Detection,
    Device,
    Runner,
    available_memory,
    detect_devices,
    parse_nvidia_smi,
)
from launcher.inventory.facts.pci import normal_address

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


RTX_4090 = recorded("nvidia-smi-rtx4090.txt").strip()
H200 = "GPU-11111111-2222-3333-4444-555555555555, 00000000:41:00.0, NVIDIA H200, 143771"
SHARED_MEMORY = recorded("nvidia-smi-memory-not-available.txt").strip()
DRIVER_MISSING = recorded("nvidia-smi-no-driver.txt")
MISMATCH = recorded("nvidia-smi-version-mismatch.txt")


def bus(folder: Path, *cards: tuple[str, str, str]) -> Path:
    """Make a /sys/bus/pci/devices of (address, vendor, class)."""
    for address, vendor, kind in cards:
        (folder / address).mkdir(parents=True)
        (folder / address / "vendor").write_text(f"{vendor}\n")
        (folder / address / "class").write_text(f"{kind}\n")
    return folder


def add_radeon(pci: Path, address: str, device: str, driver: str = "amdgpu") -> None:
    """Add a Radeon with a kernel driver and a render node that everyone may open."""
    bus(pci, (address, "0x1002", "0x030000"))
    (pci / address / "device").write_text(f"0x{device}\n")
    (pci / address / "mem_info_vram_total").write_text("17163091968\n")
    (pci / address / "driver").symlink_to(f"../../drivers/{driver}")
    (pci / address / "drm" / "renderD128").mkdir(parents=True)


def answering(**answers: str) -> Runner:
    """Return a runner that knows these programs; every other one is not installed."""

    def run(argv: Sequence[str]) -> tuple[int, str]:
        name = "whole" if list(argv) == ["vulkaninfo"] else argv[0].replace("-", "_")
        return (0, answers[name]) if name in answers else (127, f"{argv[0]}: not installed")

    return run


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
        (0, recorded("nvidia-smi-no-devices.txt"), "lists 0 of 1"),
        (124, "nvidia-smi: no answer within 20 s", "no answer"),
    ],
)
def test_a_card_without_a_working_driver_is_an_error_not_zero_gpus(
    tmp_path: Path, code: int, output: str, reason: str
) -> None:
    pci = bus(tmp_path / "pci", ("0000:01:00.0", "0x10de", "0x030000"))
    found = detect_devices(lambda _: (code, output), pci)
    assert found.devices == ()
    assert "0000:01:00.0" in found.problems[0]
    assert reason in found.problems[0]


def test_one_of_two_cards_missing_is_said_and_the_other_is_kept(tmp_path: Path) -> None:
    pci = bus(
        tmp_path / "pci",
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:02:00.0", "0x10de", "0x030200"),
    )
    found = detect_devices(lambda _: (0, RTX_4090), pci)
    assert [device.backend for device in found.devices] == ["cuda"]
    assert "lists 1 of 2" in found.problems[0]


def test_sound_functions_and_other_vendors_are_no_nvidia_gpus(tmp_path: Path) -> None:
    pci = bus(
        tmp_path / "pci",
        ("0000:00:02.0", "0x8086", "0x030000"),
        ("0000:01:00.1", "0x10de", "0x040300"),
        ("0000:0b:00.0", "0x1002", "0x030000"),
    )
    found = detect_devices(lambda _: (127, ""), pci)
    assert [device.backend for device in found.devices] == ["cpu"]
    assert found.problems == ()


def test_without_any_card_the_cpu_is_the_device(tmp_path: Path) -> None:
    found = detect_devices(lambda _: (127, ""), tmp_path / "none")
    assert [(device.backend, device.id) for device in found.devices] == [("cpu", "cpu")]


def test_gpus_without_a_pci_bus_are_found(tmp_path: Path) -> None:
    """WSL 2 shows no PCI bus, and nvidia-smi works."""
    found = detect_devices(lambda _: (0, RTX_4090), tmp_path / "none")
    assert isinstance(found, Detection)
    assert [device.backend for device in found.devices] == ["cuda"]


def test_two_radeons_are_what_auto_trains_on(tmp_path: Path) -> None:
    add_radeon(tmp_path, "0000:0c:00.0", "7310")
    add_radeon(tmp_path, "0000:12:00.0", "7310")
    found = detect_devices(
        answering(
            lspci=recorded("lspci-w5700x-pair.txt"),
            vulkaninfo=recorded("vulkaninfo-w5700x-pair.txt"),
        ),
        tmp_path,
    )
    assert found.devices == found.vulkan
    assert [(d.backend, d.id, d.kind, d.memory) for d in found.vulkan] == [
        ("wgpu", "0000:0c:00.0", "discrete", 17163091968),
        ("wgpu", "0000:12:00.0", "discrete", 17163091968),
    ]
    assert found.vulkan[0].answers_to("0000:0C:00.0")
    assert (found.problems, found.vulkan_problems) == ((), ())


def test_an_integrated_gpu_does_not_hide_the_cuda_card(tmp_path: Path) -> None:
    bus(tmp_path, ("0000:01:00.0", "0x10de", "0x030000"))
    add_radeon(tmp_path, "0000:6b:00.0", "164e")
    found = detect_devices(
        answering(
            nvidia_smi=recorded("nvidia-smi-rtx4090.txt"),
            lspci=recorded("lspci-rtx4090-beside-igpu.txt"),
            vulkaninfo=recorded("vulkaninfo-rtx4090-beside-igpu.txt"),
        ),
        tmp_path,
    )
    assert [(d.backend, d.pci) for d in found.devices] == [("cuda", "0000:01:00.0")]
    assert [(d.pci, d.kind) for d in found.vulkan] == [("0000:6b:00.0", "integrated")]


def test_a_card_that_only_software_stands_in_for_is_a_problem_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_radeon(tmp_path, "0000:0c:00.0", "7310")
    monkeypatch.setattr("launcher.inventory.facts.devices.in_container", lambda: False)
    monkeypatch.setattr("launcher.inventory.facts.devices.os.access", lambda *_: True)
    software = answering(
        vulkaninfo=recorded("vulkaninfo-llvmpipe-debian13.txt"),
        lspci=recorded("lspci-w5700x-pair.txt"),
    )
    found = detect_devices(software, tmp_path)
    assert found.vulkan == ()
    assert found.problems == ()
    assert found.vulkan_problems == (
        "0000:0c:00.0 Radeon Pro W5700X has no Vulkan driver: install mesa-vulkan-drivers",
    )
    monkeypatch.setattr("launcher.inventory.facts.devices.os.access", lambda *_: False)
    (problem,) = detect_devices(software, tmp_path).vulkan_problems
    assert "add it to group render" in problem
    (problem,) = detect_devices(answering(), tmp_path).vulkan_problems
    assert "add it to group render" in problem


def test_the_whole_vulkaninfo_is_asked_where_the_summary_does_not_say_which_card(
    tmp_path: Path,
) -> None:
    add_radeon(tmp_path, "0000:0d:00.0", "7551")
    add_radeon(tmp_path, "0000:0a:00.0", "7551")
    whole = recorded("vulkaninfo-whole-r9700.txt")
    summary = whole.replace("VkPhysicalDevicePCIBusInfoPropertiesEXT", "")
    summary = "\n".join(line for line in summary.splitlines() if "pci" not in line)
    found = detect_devices(answering(vulkaninfo=summary, whole=whole), tmp_path)
    assert [device.id for device in found.vulkan] == ["0000:0d:00.0"]
    assert "0000:0a:00.0" in found.vulkan_problems[0]


def test_software_vulkan_is_a_device_only_when_allowed(tmp_path: Path) -> None:
    run = answering(vulkaninfo=recorded("vulkaninfo-llvmpipe-debian12.txt"))
    assert detect_devices(run, tmp_path).vulkan == ()
    (device,) = detect_devices(run, tmp_path, allow_software=True).vulkan
    assert (device.backend, device.id, device.kind, device.pci) == (
        "wgpu",
        "llvmpipe",
        "software",
        "",
    )


def test_software_devices_are_named_by_their_driver(tmp_path: Path) -> None:
    run = answering(vulkaninfo=recorded("vulkaninfo-two-drivers.txt"))
    found = detect_devices(run, tmp_path, allow_software=True).vulkan
    assert [(device.id, device.kind) for device in found] == [
        ("SwiftShader", "software"),
        ("llvmpipe", "software"),
    ]
    assert all(device.id in device.name for device in found), "a trainer finds each by its id"


def test_a_cpu_answers_to_its_id_alone() -> None:
    assert not Device("cpu", "cpu").answers_to("")
    assert normal_address("00000000:0B:00.0") == "0000:0b:00.0"


def test_available_memory_is_read_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable:    4 kB\n")
    assert available_memory(tmp_path / "meminfo") == 4096
    assert available_memory(tmp_path / "absent") is None
