"""Cards on the bus, from recorded `lspci -nn -D` and from sysfs."""

from pathlib import Path

import pytest

from launcher.inventory.facts.pci import Card, name_cards, normal_address, parse_lspci, read_cards

RECORDED = Path(__file__).parent / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def make_bus(folder: Path) -> Path:
    """A sysfs PCI folder with a Radeon that amdgpu drives, and a chip that is no GPU."""
    for address, vendor, kind in (
        ("0000:0c:00.0", "0x1002", "0x030000"),
        ("0000:0c:00.1", "0x1002", "0x040300"),
        ("0000:c4:00.0", "0x1a03", "0x030000"),
    ):
        (folder / address).mkdir(parents=True)
        (folder / address / "vendor").write_text(f"{vendor}\n")
        (folder / address / "device").write_text("0x7310\n")
        (folder / address / "class").write_text(f"{kind}\n")
    radeon = folder / "0000:0c:00.0"
    (folder / "amdgpu").mkdir()
    (radeon / "driver").symlink_to(folder / "amdgpu")
    (radeon / "drm" / "renderD128").mkdir(parents=True)
    (radeon / "drm" / "card0").mkdir()
    (radeon / "mem_info_vram_total").write_text("17163091968\n")
    return folder


def test_a_pair_of_equal_cards_is_two_addresses() -> None:
    assert parse_lspci(recorded("lspci-w5700x-pair.txt")) == (
        Card("0000:0c:00.0", "1002", "7310", "Radeon Pro W5700X"),
        Card("0000:12:00.0", "1002", "7310", "Radeon Pro W5700X"),
    )


def test_an_integrated_gpu_hides_nothing() -> None:
    found = parse_lspci(recorded("lspci-rtx4090-beside-igpu.txt"))
    assert [(card.address, card.vendor, card.name) for card in found] == [
        ("0000:01:00.0", "10de", "GeForce RTX 4090"),
        ("0000:6b:00.0", "1002", "Advanced Micro Devices, Inc. [AMD/ATI] Raphael"),
    ]


@pytest.mark.parametrize("name", ["lspci-no-card.txt", "lspci-management-chip.txt"])
def test_what_cannot_train_is_no_card(name: str) -> None:
    assert parse_lspci(recorded(name)) == ()


def test_lines_that_are_not_devices_are_skipped() -> None:
    assert parse_lspci("pcilib: Cannot open /proc/bus/pci\nlspci: Cannot find any working\n") == ()


def test_sysfs_tells_driver_render_node_and_memory(tmp_path: Path) -> None:
    assert read_cards(make_bus(tmp_path)) == (
        Card(
            "0000:0c:00.0",
            "1002",
            "7310",
            driver="amdgpu",
            node="/dev/dri/renderD128",
            memory=17163091968,
        ),
    )
    assert read_cards(tmp_path / "absent") == ()


def test_names_come_from_lspci_and_are_not_needed(tmp_path: Path) -> None:
    found = read_cards(make_bus(tmp_path))
    (card,) = name_cards(found, recorded("lspci-w5700x-pair.txt"))
    assert card.title == "0000:0c:00.0 Radeon Pro W5700X"
    assert card.node == "/dev/dri/renderD128"
    assert name_cards(found, "lspci: not installed")[0].title == "0000:0c:00.0 AMD card 1002:7310"


def test_addresses_are_spelled_as_the_kernel_does() -> None:
    assert normal_address("00000000:0B:00.0") == "0000:0b:00.0"
