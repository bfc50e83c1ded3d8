"""The Vulkan devices of this machine, and the selection of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import wgpu
from wgpu.backends import wgpu_native

from trainer.replica.wgpu.gpu.c_types import parse_together
from trainer.replica.wgpu.gpu.errors import DeviceError, NoGpuError
from trainer.system import pci

parse_together(wgpu_native.ffi)  # at import: a parent of workers parses for all that it forks

Kind = Literal["discrete", "integrated", "other", "software"]

_KINDS: dict[str, Kind] = {
    "DiscreteGPU": "discrete",
    "IntegratedGPU": "integrated",
    "CPU": "software",
}
_ORDER: tuple[Kind, ...] = ("discrete", "integrated", "other", "software")


@dataclass(frozen=True)
class Adapter:
    """A Vulkan device; `software` ones compute on the CPU, such as Mesa's llvmpipe."""

    index: int
    """Its place in `list_adapters()`."""
    name: str
    driver: str
    """Name and version of the driver, as it reports them."""
    kind: Kind
    vendor: int = 0
    """PCI ids."""
    device: int = 0
    address: str = ""
    """PCI address such as `0000:0b:00.0`, if it is certain."""
    handle: Any = field(default=None, repr=False, compare=False)

    @property
    def software(self) -> bool:
        """Whether the CPU computes it."""
        return self.kind == "software"

    @property
    def key(self) -> str:
        """The key of a cache of tuned variants."""
        return f"{self.name} | {self.driver} | wgpu-native {wgpu_native.__version__}"

    def __str__(self) -> str:
        place = f" at {self.address}" if self.address else ""
        return f"{self.index}: {self.name}{place} ({self.kind})"


def list_adapters() -> list[Adapter]:
    """Return the Vulkan devices of this machine: discrete, integrated, others, software."""
    found = [
        _read_adapter(handle)
        for handle in wgpu.gpu.enumerate_adapters_sync()
        if handle.info["backend_type"] == "Vulkan"
    ]
    return order_adapters(locate_adapters(found))


def select_adapter(wanted: str = "", *, allow_software: bool = False) -> Adapter:
    """Return the selected adapter.

    Args:
        wanted: an index of `list_adapters()`, a PCI address, or a part of the name (the first
            match); empty for the first GPU.
        allow_software: with an empty `wanted`, take a software adapter if there is no GPU.

    Raises:
        DeviceError: there is none; lists the existing ones.
    """
    return pick_adapter(list_adapters(), wanted, allow_software=allow_software)


def pick_adapter(found: Sequence[Adapter], wanted: str, *, allow_software: bool) -> Adapter:
    """Return the selected adapter of `found`; see `select_adapter`."""
    if not found:
        raise NoGpuError("no Vulkan device answers")
    matching = [adapter for adapter in found if _is_wanted(adapter, wanted)]
    if not wanted and not allow_software:
        matching = [adapter for adapter in matching if not adapter.software]
    if not matching:
        if not wanted:
            names = ", ".join(adapter.name for adapter in found)
            raise NoGpuError(f"only software Vulkan devices ({names})")
        listed = ", ".join(map(str, found))
        raise DeviceError(f"no Vulkan device is {wanted!r}; found: {listed}")
    return matching[0]


def locate_adapters(
    found: Sequence[Adapter],
    addresses: Callable[[int, int], list[str]] = pci.find_addresses,
) -> list[Adapter]:
    """Return the adapters with their PCI addresses.

    wgpu reports ids but no address. Equal cards are assumed to be listed in the order of the bus;
    if some are missing, it is unknown which, and none gets an address.
    """
    twins = Counter(_card_key(adapter) for adapter in found)
    seen: Counter[tuple[int, int, str]] = Counter()
    placed: list[Adapter] = []
    for adapter in found:
        model = _card_key(adapter)
        places = addresses(adapter.vendor, adapter.device)
        certain = len(places) == twins[model]
        placed.append(replace(adapter, address=places[seen[model]] if certain else ""))
        seen[model] += 1
    return placed


def order_adapters(found: Sequence[Adapter]) -> list[Adapter]:
    """Return the adapters sorted by kind, otherwise in order, and numbered."""
    listed = sorted(found, key=lambda adapter: _ORDER.index(adapter.kind))
    return [replace(adapter, index=index) for index, adapter in enumerate(listed)]


def _is_wanted(adapter: Adapter, wanted: str) -> bool:
    if wanted.isdecimal():
        return adapter.index == int(wanted)
    if address := pci.normalize_address(wanted):
        return adapter.address == address
    return wanted.casefold() in adapter.name.casefold()


def _card_key(adapter: Adapter) -> tuple[int, int, str]:
    """Return the key of equal cards; two drivers may list the same card once each."""
    return adapter.vendor, adapter.device, adapter.driver


def _read_adapter(handle: Any) -> Adapter:
    info = handle.info
    return Adapter(
        index=0,
        name=info["device"],
        driver=info["description"],
        kind=_KINDS.get(info["adapter_type"], "other"),
        vendor=info["vendor_id"],
        device=info["device_id"],
        handle=handle,
    )
