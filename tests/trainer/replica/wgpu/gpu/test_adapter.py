"""Which Vulkan device is meant, by index, PCI address or name."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.replica.wgpu.gpu.vulkan_adapter import (
    Adapter,
    Kind,
    list_adapters,
    locate_adapters,
    order_adapters,
    pick_adapter,
    select_adapter,
)
from trainer.system import pci

AMD, NAVI10, ARC = 0x1002, 0x7310, 0x56A0


def shown(name: str, kind: Kind, vendor: int = 0, device: int = 0, driver: str = "d") -> Adapter:
    return Adapter(0, name, driver, kind, vendor, device)


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A Mac Pro's two W5700X and an Arc, as Linux shows them."""
    for address, vendor, device in (
        ("0000:ff:00.0", "0x1002", "0x7310"),
        ("0000:0b:00.0", "0x1002", "0x7310"),
        ("0000:03:00.0", "0x8086", "0x56a0"),
        ("0000:00:1f.0", "0x8086", "0x06a4"),
    ):
        folder = tmp_path / address
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    return tmp_path


@pytest.fixture
def found(bus: Path) -> list[Adapter]:
    listed = [
        shown("llvmpipe (LLVM 15)", "software", 0x10005),
        shown("AMD Radeon Pro W5700X", "discrete", AMD, NAVI10),
        shown("Intel(R) UHD", "integrated", 0x8086, 0x9BC5),
        shown("AMD Radeon Pro W5700X", "discrete", AMD, NAVI10),
        shown("Intel(R) Arc(tm) A770", "discrete", 0x8086, ARC),
    ]
    return order_adapters(
        locate_adapters(listed, lambda vendor, device: pci.find_addresses(vendor, device, bus))
    )


def test_strongest_kind_first_and_numbered(found: list[Adapter]) -> None:
    assert [str(adapter) for adapter in found] == [
        "0: AMD Radeon Pro W5700X at 0000:0b:00.0 (discrete)",
        "1: AMD Radeon Pro W5700X at 0000:ff:00.0 (discrete)",
        "2: Intel(R) Arc(tm) A770 at 0000:03:00.0 (discrete)",
        "3: Intel(R) UHD (integrated)",
        "4: llvmpipe (LLVM 15) (software)",
    ]


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ("", 0),
        ("1", 1),
        ("0000:ff:00.0", 1),
        ("00000000:FF:00.0", 1),
        ("0b:00.0", 0),
        ("w5700x", 0),
        ("Arc", 2),
        ("4", 4),
        ("llvmpipe", 4),
    ],
)
def test_what_is_meant(found: list[Adapter], wanted: str, index: int) -> None:
    for allow_software in (False, True):
        assert pick_adapter(found, wanted, allow_software=allow_software).index == index


@pytest.mark.parametrize("wanted", ["5", "0000:0c:00.0", "GeForce"])
def test_who_is_not_there(found: list[Adapter], wanted: str) -> None:
    with pytest.raises(DeviceError) as error:
        pick_adapter(found, wanted, allow_software=True)
    assert f"no Vulkan device is '{wanted}'; found: 0: AMD" in str(error.value)
    assert str(error.value).endswith("4: llvmpipe (LLVM 15) (software)")


def test_software_is_taken_where_it_is_allowed_and_all_there_is() -> None:
    alone = order_adapters([shown("llvmpipe", "software")])
    assert pick_adapter(alone, "", allow_software=True).software
    with pytest.raises(DeviceError, match=r"^only software Vulkan devices \(llvmpipe\)$"):
        pick_adapter(alone, "", allow_software=False)


def test_no_vulkan_at_all() -> None:
    with pytest.raises(DeviceError, match="no Vulkan device answers"):
        pick_adapter([], "", allow_software=True)


def test_one_of_two_equal_cards_has_no_certain_address(bus: Path) -> None:
    def addresses(vendor: int, device: int) -> list[str]:
        return pci.find_addresses(vendor, device, bus)

    (one,) = locate_adapters([shown("W5700X", "discrete", AMD, NAVI10)], addresses)
    assert one.address == ""


def test_a_card_that_two_drivers_show(bus: Path) -> None:
    def addresses(vendor: int, device: int) -> list[str]:
        return pci.find_addresses(vendor, device, bus)

    both = [shown("Arc", "discrete", 0x8086, ARC, driver) for driver in ("anv", "other")]
    assert [adapter.address for adapter in locate_adapters(both, addresses)] == ["0000:03:00.0"] * 2


@pytest.mark.parametrize("text", ["", "7", "GPU-6f7a", "0000:0b:00", "0b:00.9", "Arc"])
def test_what_is_no_address(text: str) -> None:
    assert pci.normalize_address(text) is None


@pytest.mark.usefixtures("vulkan")
def test_this_machines_own() -> None:
    own = list_adapters()
    assert [adapter.index for adapter in own] == list(range(len(own)))
    assert select_adapter(own[-1].name, allow_software=True).name == own[-1].name
    assert select_adapter(allow_software=True).index == 0
