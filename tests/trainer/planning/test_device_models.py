"""Devices by the names that their drivers report."""

from __future__ import annotations

import pytest

from trainer.planning.device_models import DEVICES, find_device
from trainer.planning.devices import GIB
from trainer.system.errors import InputError


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-80G-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA H100 PCIe", "H100-80G-PCIe"),
        ("NVIDIA H100 NVL", "H100-94G-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("Tesla V100-SXM2-16GB", "V100-16G"),
        ("Tesla V100-SXM2-32GB", "V100-32G"),
        ("Tesla V100-PCIE-16GB", "V100-16G-PCIe"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("Quadro RTX 6000", "QuadroRTX6000"),
        ("NVIDIA TITAN RTX", "TitanRTX"),
        ("NVIDIA GeForce RTX 2060", "RTX2060"),
        ("NVIDIA GeForce RTX 3050", "RTX3050"),
        ("NVIDIA GeForce RTX 3080", "RTX3080"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX3090Ti"),
        ("NVIDIA GeForce RTX 4090 D", "RTX4090D"),
        ("NVIDIA GeForce RTX 5060", "RTX5060"),
        ("AMD Radeon RX 580 Series (RADV POLARIS10)", "RX580"),
        ("NVIDIA H100 80GB HBM3", "H100-80G"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "A6000"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 3060", "RTX3060"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX4060Ti-8G"),
        ("RTX 4060 Ti 8GB", "RTX4060Ti-8G"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA RTX A2000 12GB", "A2000-12G"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TiSuper"),
        ("Tesla P40", "P40"),
        ("AMD Radeon Pro W5700X (RADV NAVI10)", "W5700X"),
        ("AMD Radeon RX 6800 XT (RADV NAVI21)", "RX6800XT"),
        ("AMD Radeon RX 7900 XT", "RX7900XT"),
        ("Intel(R) Arc(tm) A770 Graphics (DG2)", "A770"),
        ("Apple M2 Ultra 192GB", "M2Ultra-192G"),
    ],
)
def test_devices_by_the_name_that_their_driver_reports(reported: str, name: str) -> None:
    assert find_device(reported).name == name


def test_every_row_is_found_by_its_name() -> None:
    assert [find_device(name).name for name in DEVICES] == list(DEVICES)


@pytest.mark.parametrize(
    ("reported", "memory", "name"),
    [
        ("NVIDIA GeForce RTX 4060 Ti", 15.6, "RTX4060Ti-16G"),
        ("NVIDIA GeForce RTX 4060 Ti", 7.8, "RTX4060Ti-8G"),
        ("NVIDIA GeForce RTX 3060", 11.6, "RTX3060"),
        ("NVIDIA GeForce RTX 3060", 7.8, "RTX3060-8G"),
        ("NVIDIA GeForce RTX 3080", 11.8, "RTX3080-12G"),
        ("NVIDIA GeForce RTX 5060 Ti", 15.5, "RTX5060Ti-16G"),
        ("NVIDIA RTX A2000", 5.8, "A2000-6G"),
    ],
)
def test_one_name_of_several_sizes_is_told_by_the_memory(
    reported: str, memory: float, name: str
) -> None:
    assert find_device(reported, memory * GIB).name == name


@pytest.mark.parametrize(
    "reported",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4060 Laptop GPU",
        "NVIDIA GeForce RTX 2070 with Max-Q Design",
        "NVIDIA RTX A2000 Laptop GPU",
        "AMD Radeon RX 6800M (RADV NAVI22)",
    ],
)
def test_a_laptops_card_is_no_desktop_card(reported: str) -> None:
    with pytest.raises(InputError, match=r"unknown device .*; near it: .*any card by its memory"):
        find_device(reported)


def test_forms_of_one_card_differ_in_speed_and_power() -> None:
    cards = [find_device(f"NVIDIA H100 {form}") for form in ("80GB HBM3", "PCIe", "NVL")]
    assert [(card.flops, card.watts) for card in cards] == [
        (989e12, 700),
        (756e12, 350),
        (835e12, 400),
    ]
