"""What Vulkan shows, over recorded outputs: software is never a GPU, addresses are confirmed."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.inventory.facts.pci import Card, parse_lspci
from launcher.inventory.facts.vulkan import (
    Adapter,
    explain_missing,
    locate_adapters,
    parse_vulkaninfo,
    select_usable,
)

RECORDED = Path(__file__).parent / "recorded"
RADEON = Card("0000:03:00.0", "1002", "7310", "Radeon Pro W5700X", "amdgpu", "/dev/dri/renderD128")
ARC = Adapter("Arc", "discrete", "8086", "56a0", uuid="868056a0-0800-0000-0300-000000000000")


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("release", ["debian12", "debian13"])
def test_llvmpipe_counts_only_when_it_is_asked_for(release: str) -> None:
    (adapter,) = parse_vulkaninfo(recorded(f"vulkaninfo-llvmpipe-{release}.txt"))
    assert (adapter.kind, adapter.driver, adapter.is_gpu) == ("software", "llvmpipe", False)
    assert select_usable([adapter]) == ()
    assert select_usable([adapter], allow_software=True) == (adapter,)


def test_a_loader_without_drivers_shows_nothing() -> None:
    assert parse_vulkaninfo(recorded("vulkaninfo-no-driver.txt")) == ()


def test_two_equal_cards_are_told_apart_by_their_uuid() -> None:
    adapters = locate_adapters(
        parse_vulkaninfo(recorded("vulkaninfo-w5700x-pair.txt")),
        parse_lspci(recorded("lspci-w5700x-pair.txt")),
    )
    assert [(adapter.pci, adapter.kind, adapter.driver) for adapter in adapters] == [
        ("0000:0c:00.0", "discrete", "radv"),
        ("0000:12:00.0", "discrete", "radv"),
        ("", "software", "llvmpipe"),
    ]
    assert [adapter.pci for adapter in select_usable(adapters)] == ["0000:0c:00.0", "0000:12:00.0"]


def test_beside_a_discrete_gpu_the_integrated_one_comes_last_and_nvidia_is_for_cuda() -> None:
    adapters = locate_adapters(
        parse_vulkaninfo(recorded("vulkaninfo-rtx4090-beside-igpu.txt")),
        parse_lspci(recorded("lspci-rtx4090-beside-igpu.txt")),
    )
    assert [(adapter.pci, adapter.vendor) for adapter in adapters] == [
        ("0000:6b:00.0", "1002"),
        ("0000:01:00.0", "10de"),
        ("", "10005"),
    ]
    (igpu,) = select_usable(adapters)
    assert igpu.kind == "integrated"
    strong = Adapter("W5700X", "discrete", "1002", "7310", pci="0000:ff:00.0")
    assert select_usable([igpu, strong]) == (strong, igpu)


def test_intel_writes_its_address_otherwise() -> None:
    bus = [
        Card("0000:00:02.0", "8086", "a788"),
        Card("0000:03:00.0", "8086", "56a0"),
        Card("0000:0a:00.0", "8086", "56a0"),
    ]
    intel, *_ = parse_vulkaninfo(recorded("vulkaninfo-intel-beside-nvidia.txt"))
    assert locate_adapters([intel], bus)[0].pci == "0000:00:02.0"
    two = [ARC, replace(ARC, uuid="868056a0-0800-0000-0a00-000000000000")]
    assert [adapter.pci for adapter in locate_adapters(two, bus)] == [
        "0000:03:00.0",
        "0000:0a:00.0",
    ]


def test_the_whole_vulkaninfo_names_the_address() -> None:
    (adapter,) = parse_vulkaninfo(recorded("vulkaninfo-whole-r9700.txt"))
    assert (adapter.pci, adapter.kind) == ("0000:0d:00.0", "discrete")


def test_a_single_card_is_known_by_its_ids_alone() -> None:
    card = replace(RADEON, address="0001:03:00.0")
    adapter = Adapter("W5700X", "discrete", "1002", "7310", uuid="ffffffff-" + "0" * 23)
    assert locate_adapters([adapter], [card])[0].pci == "0001:03:00.0"


def test_an_address_that_the_bus_does_not_confirm_is_not_invented() -> None:
    other = replace(RADEON, device="731f")  # another model sits at that address
    twins = [RADEON, replace(RADEON, address="0000:04:00.0")]
    adapter = Adapter(
        "W5700X", "discrete", "1002", "7310", uuid="00000000-0300-0000-0000-000000000000"
    )
    assert locate_adapters([adapter], [other])[0].pci == ""
    assert locate_adapters([replace(adapter, uuid="")], twins)[0].pci == ""
    assert locate_adapters([replace(adapter, uuid="no hex")], twins)[0].pci == ""
    two = [replace(adapter, uuid=""), replace(adapter, uuid="")]
    assert [one.pci for one in locate_adapters(two, [RADEON])] == ["", ""]


@pytest.mark.parametrize(
    ("card", "code", "accessible", "remedy"),
    [
        (replace(RADEON, driver="vfio-pci"), 0, True, "virtual machine"),
        (replace(RADEON, node=""), 0, True, "firmware-amd-graphics"),
        (RADEON, 0, False, "is not accessible for user motley: add it to group render"),
        (RADEON, 127, True, "install vulkan-tools"),
        (RADEON, 124, True, "no answer within"),
        (RADEON, 0, True, "has no Vulkan driver: install mesa-vulkan-drivers"),
    ],
)
def test_a_missing_card_is_explained_with_its_remedy(
    card: Card, code: int, accessible: bool, remedy: str
) -> None:
    output = "vulkaninfo: no answer within 20 s"
    line = explain_missing(card, code, output, accessible, "motley")
    assert line.startswith("0000:03:00.0 Radeon Pro W5700X ")
    assert remedy in line
    assert "\n" not in line
