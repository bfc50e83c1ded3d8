"""The choice of a device's variant of a matrix product."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.kernels.gemm.variants import (
    ALL,
    DIRECT,
    DIRECT_ROW,
    LANES,
    SHARED,
    SHARED_LOW,
    SPLIT,
    SPLIT_ROW,
    TILED,
    TILED_DEEP,
    TILED_LARGE,
    Product,
    Variant,
)
from trainer.replica.wgpu.kernels.source import source

_FEW = 64
"""Workgroups below which a GPU is not filled."""

_TUNED: WeakKeyDictionary[Device, dict[str, Variant]] = WeakKeyDictionary()
_SHARING: WeakKeyDictionary[Device, bool] = WeakKeyDictionary()


class Variants:
    """The variants of a device: the tuned ones, else defaults."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.tuned = _TUNED.setdefault(device, {})
        """By the key of a product."""

    def choose(self, product: Product) -> Variant:
        """Return the variant for a product."""
        return self.tuned.get(product.key) or self.default(product)

    def default(self, product: Product) -> Variant:
        """Return the variant of an untuned device."""
        if self._device.adapter.software:
            if product.m < 4:
                return DIRECT_ROW
            if not self.sharing:
                return DIRECT
            return SHARED if product.m > 2 * SHARED_LOW.rows else SHARED_LOW
        if product.m < 4:
            return SPLIT_ROW
        rows, columns = TILED.tile
        groups = -(-product.m // rows) * -(-product.n // columns)
        if groups < _FEW and product.k >= 256:
            return SPLIT
        return TILED if product.kind_b == "f32" else TILED_DEEP

    def candidates(self, product: Product) -> list[Variant]:
        """Return the variants worth timing for a product."""
        if product.m < 4:
            return [DIRECT_ROW, SPLIT_ROW]
        if self._device.adapter.software:
            return [DIRECT, *([SHARED, SHARED_LOW] if self.sharing else [])]
        deep = TILED if product.kind_b == "f32" else TILED_DEEP
        return [deep, TILED_LARGE, SPLIT, DIRECT]

    def usable(self) -> list[Variant]:
        """Return the variants that this device can run."""
        return [variant for variant in ALL if variant.kind != "shared" or self.sharing]

    @property
    def sharing(self) -> bool:
        """Whether 8 threads are one subgroup, numbered as in the workgroup."""
        if self._device not in _SHARING:
            _SHARING[self._device] = self._find_sharing()
        return _SHARING[self._device]

    def _find_sharing(self) -> bool:
        if "subgroup" not in self._device.handle.features:
            return False
        sizes = self._device.array((LANES,), "u32")
        graph = Graph(self._device)
        graph.add("lanes", source("lanes"), [sizes], {}, (1, 1, 1))
        graph.run()
        smallest = int(self._device.read(sizes).min())
        assert sizes.buffer is not None
        self._device.release(sizes.buffer)
        return smallest >= LANES
