"""The choice of a variant of a matrix product."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.kernels.gemm.variants import (
    DIRECT,
    DIRECT_ROW,
    SPLIT,
    SPLIT_ROW,
    TILED,
    TILED_DEEP,
    TILED_LARGE,
    Product,
    Variant,
)

_FEW = 64
"""Workgroups below which a GPU is not filled."""

_TUNED: WeakKeyDictionary[Device, dict[str, Variant]] = WeakKeyDictionary()


def tuned_variants(device: Device) -> dict[str, Variant]:
    """Return the tuned variants of a device, by the key of a product; to be changed in place."""
    return _TUNED.setdefault(device, {})


def choose_variant(device: Device | None, product: Product) -> Variant:
    """Return the tuned variant of a device for a product, else the default."""
    tuned = tuned_variants(device).get(product.key) if device else None
    return tuned or default_variant(product)


def default_variant(product: Product) -> Variant:
    """Return the variant for a product on an untuned device, whatever it is."""
    if product.m < 4:
        return SPLIT_ROW
    rows, columns = TILED.tile
    groups = -(-product.m // rows) * -(-product.n // columns)
    if groups < _FEW and product.k >= 256:
        return SPLIT
    return _tiled_variant(product)


def list_candidates(product: Product) -> list[Variant]:
    """Return the variants worth timing for a product."""
    if product.m < 4:
        return [DIRECT_ROW, SPLIT_ROW]
    return [_tiled_variant(product), TILED_LARGE, SPLIT, DIRECT]


def _tiled_variant(product: Product) -> Variant:
    return TILED if product.kind_b == "f32" else TILED_DEEP
