"""What the roles make of a host's answers: the launcher's reading, in Ansible's shapes."""

from pathlib import Path
from typing import Any

from tests.recipes.plugins import load

RECORDED = Path(__file__).parents[1] / "launcher" / "inventory" / "facts" / "recorded"
filters = load("filter_plugins/motley_devices.py").FilterModule().filters()
NOT_FOUND = {"rc": 2, "msg": "[Errno 2] No such file or directory: b'vulkaninfo'"}


def recorded(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


def answered(name: str, rc: int = 0) -> dict[str, Any]:
    return {"rc": rc, "stdout": recorded(name), "stderr": ""}


PAIR = filters["motley_cards"](recorded("lspci-w5700x-pair.txt"))
BESIDE = filters["motley_cards"](recorded("lspci-rtx4090-beside-igpu.txt"))


def test_cards_are_mappings_with_a_title_for_people() -> None:
    assert [card["title"] for card in PAIR] == [
        "0000:0c:00.0 Radeon Pro W5700X",
        "0000:12:00.0 Radeon Pro W5700X",
    ]
    assert filters["motley_cards"](recorded("lspci-no-card.txt")) == []


def test_a_cuda_card_answers_or_is_a_problem_never_nothing() -> None:
    good = filters["motley_cuda"](answered("nvidia-smi-rtx4090.txt"), BESIDE)
    assert [device["pci"] for device in good["devices"]] == ["0000:01:00.0"]
    assert good["problems"] == []
    for name, reason in (
        ("nvidia-smi-version-mismatch.txt", "version mismatch"),
        ("nvidia-smi-no-driver.txt", "couldn't communicate"),
    ):
        bad = filters["motley_cuda"](answered(name, 18), BESIDE)
        assert bad["devices"] == []
        assert reason in bad["problems"][0]
    (missing,) = filters["motley_cuda"](NOT_FOUND, BESIDE)["problems"]
    assert "no driver is installed" in missing
    said = {"rc": 18, "stdout": "", "stderr": recorded("nvidia-smi-version-mismatch.txt")}
    assert "version mismatch" in filters["motley_cuda"](said, BESIDE)["problems"][0]


def problems(result: dict[str, Any], links: list[str], openable: list[str]) -> list[str]:
    shown = filters["motley_adapters"](result, PAIR)
    found = filters["motley_vulkan_problems"](
        shown, PAIR, result=result, links=links, openable=openable, user="motley"
    )
    return [problem["reason"] for problem in found]


def links_of(address: str, node: str) -> list[str]:
    folder = f"/sys/bus/pci/devices/{address}"
    return [f"{folder}/driver ../../../bus/pci/drivers/amdgpu", f"{folder}/drm/{node} "]


LINKS = links_of("0000:0c:00.0", "renderD128") + links_of("0000:12:00.0", "renderD129")
NODES = ["/dev/dri/renderD128", "/dev/dri/renderD129"]


def test_both_cards_are_seen_and_software_counts_only_when_asked_for() -> None:
    result = answered("vulkaninfo-w5700x-pair.txt")
    shown = filters["motley_adapters"](result, PAIR)
    assert problems(result, LINKS, NODES) == []
    real = filters["motley_usable_adapters"](shown)
    assert [adapter["pci"] for adapter in real] == ["0000:0c:00.0", "0000:12:00.0"]
    assert len(filters["motley_usable_adapters"](shown, True)) == 3


def test_each_card_that_is_missing_gets_its_own_reason() -> None:
    software = answered("vulkaninfo-llvmpipe-debian13.txt")
    first, second = problems(software, LINKS, NODES[:1])
    assert first.endswith("has no Vulkan driver: install mesa-vulkan-drivers")
    assert "0000:12:00.0" in second
    assert "add it to group render" in second
    assert "firmware-amd-graphics" in problems(software, LINKS[2:], NODES)[0]
    assert "install vulkan-tools" in problems(NOT_FOUND, LINKS, NODES)[0]


def test_nvidia_cards_are_no_problem_of_vulkan() -> None:
    result = answered("vulkaninfo-rtx4090-beside-igpu.txt")
    shown = filters["motley_adapters"](result, BESIDE)
    assert [adapter["pci"] for adapter in filters["motley_usable_adapters"](shown)] == [
        "0000:6b:00.0"
    ]
    assert (
        filters["motley_vulkan_problems"](
            shown, BESIDE, result=result, links=[], openable=[], user="motley"
        )
        == []
    )
