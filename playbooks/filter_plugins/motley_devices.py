"""Filters over a host's report of its cards, parsed as the launcher parses it.

One reading for recipes and launcher: this file only finds the checkout's `launcher` package, whose
modules used here need nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[2]) not in sys.path:
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from launcher.inventory.facts import devices, pci, vulkan


def cards(lspci: str) -> list[dict[str, Any]]:
    """`lspci -nn -D` -> the cards that can train, one mapping each; see Card in facts/pci.py."""
    return [{**dataclasses.asdict(card), "title": card.title} for card in pci.parse_lspci(lspci)]


def cuda(result: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    """A registered nvidia-smi query -> its devices, and a problem for each card without one."""
    wanted = [card for card in _cards(found) if card.vendor == pci.NVIDIA]
    code = _code(result)
    output = f"{result.get('stdout', '')}\n{result.get('stderr', '')}"
    detection = devices.detect_cuda(wanted, code, result.get("stdout", "") if code == 0 else output)
    return {
        "devices": [dataclasses.asdict(device) for device in detection.devices],
        "problems": list(detection.problems),
    }


def adapters(result: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A registered `vulkaninfo --summary` -> every Vulkan device, with PCI addresses."""
    shown = vulkan.locate_adapters(vulkan.parse_vulkaninfo(result.get("stdout", "")), _cards(found))
    return [{**dataclasses.asdict(adapter), "is_gpu": adapter.is_gpu} for adapter in shown]


def usable_adapters(
    shown: list[dict[str, Any]], allow_software: bool = False
) -> list[dict[str, Any]]:
    """Vulkan devices -> those a wgpu worker may run on, strongest kind first."""
    return [
        dataclasses.asdict(adapter)
        for adapter in vulkan.select_usable([_adapter(one) for one in shown], allow_software)
    ]


def vulkan_problems(
    shown: list[dict[str, Any]],
    found: list[dict[str, Any]],
    *,
    result: dict[str, Any],
    links: list[str],
    openable: list[str],
    user: str,
) -> list[dict[str, str]]:
    """Return address and reason of each card that Vulkan does not show.

    `links` are the host's `find /sys/bus/pci/devices/ADDRESS/{driver,drm/renderD*}` lines as
    `path target`; `openable` the render nodes that `user` may open.
    """
    seen = {adapter["pci"] for adapter in shown}
    problems: list[dict[str, str]] = []
    for card in _cards(found):
        if card.vendor == pci.NVIDIA or card.address in seen:
            continue
        for line in links:
            path, _, target = line.partition(" ")
            if f"/{card.address}/" not in f"{path}/":
                continue
            if path.endswith("/driver"):
                card = dataclasses.replace(card, driver=Path(target).name)
            elif "/drm/renderD" in path:
                card = dataclasses.replace(card, node=f"/dev/dri/{Path(path).name}")
        reason = vulkan.explain_missing(
            card, _code(result), result.get("stdout", ""), card.node in openable, user
        )
        problems.append({"address": card.address, "reason": reason})
    return problems


def _code(result: dict[str, Any]) -> int:
    """Return the exit code as the launcher uses it; Ansible has 2 for a program not found."""
    missing = "No such file" in str(result.get("msg", ""))
    return 127 if missing or result.get("rc") is None else int(result["rc"])


def _cards(found: list[dict[str, Any]]) -> tuple[pci.Card, ...]:
    return tuple(pci.Card(**{k: v for k, v in card.items() if k != "title"}) for card in found)


def _adapter(shown: dict[str, Any]) -> vulkan.Adapter:
    return vulkan.Adapter(**{k: v for k, v in shown.items() if k != "is_gpu"})


class FilterModule:
    """What Ansible asks a filter plugin for."""

    def filters(self) -> dict[str, Any]:
        """Return the filters by the names that tasks use."""
        return {
            "motley_cards": cards,
            "motley_cuda": cuda,
            "motley_adapters": adapters,
            "motley_usable_adapters": usable_adapters,
            "motley_vulkan_problems": vulkan_problems,
        }
