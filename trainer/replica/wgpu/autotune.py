"""Time the variants of matrix products on a device, and store the fastest.

An adapter's table is in the user's cache folder and is valid for one driver and one version of
wgpu-native. A device without one takes the defaults of `kernels.gemm.choice`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config.lora import LINEARS
from trainer.model.architecture import Architecture
from trainer.planning.vulkan_buffers import Kind
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.graph import Graph
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.replica.wgpu.kernels.gemm.choice import list_candidates, tuned_variants
from trainer.replica.wgpu.kernels.gemm.record import gemm
from trainer.replica.wgpu.kernels.gemm.variants import ALL, Product, Variant
from trainer.system.storage.atomic_file import write_atomically
from trainer.system.storage.cache_folder import cache_root

log = logging.getLogger(__name__)

_REPEATS = 3
_SECONDS = 0.5  # a variant that takes longer than this is timed once


@dataclass(frozen=True)
class VariantTiming:
    """The speed of one variant."""

    product: Product
    variant: Variant
    seconds: float

    @property
    def gflops(self) -> float:
        """10^9 additions and multiplications a second."""
        product = self.product
        return 2e-9 * product.m * product.n * product.k / self.seconds


def list_products(model: Architecture, kind: Kind, tokens: int, rank: int = 16) -> list[Product]:
    """Return the products of a training step of `tokens`, one of each class, without batches."""
    found: list[Product] = []
    for linear in LINEARS:
        out, inner = model.linear_shape(linear)
        found += [
            Product(False, True, kind, tokens, out, inner),
            Product(False, False, kind, tokens, inner, out),
            Product(False, True, "f32", tokens, rank, inner),
            Product(False, True, "f32", tokens, out, rank),
            Product(False, False, "f32", tokens, rank, out),
            Product(False, False, "f32", tokens, inner, rank),
            Product(True, False, "f32", rank, inner, tokens),
            Product(True, False, "f32", out, rank, tokens),
        ]
    rows = model.num_heads // model.num_kv_heads * tokens
    found += [
        Product(False, True, "f32", rows, tokens, model.head_dim),
        Product(False, False, "f32", rows, model.head_dim, tokens),
        Product(True, False, "f32", tokens, model.head_dim, rows),
    ]
    return list({product.key: product for product in found}.values())


def tune_device(device: Device, wanted: Iterable[Product]) -> Iterator[list[VariantTiming]]:
    """Time the candidates of each product, fastest first, and set the device to the fastest.

    Raises:
        DeviceError: a product does not fit.
    """
    for product in wanted:
        timings = [
            VariantTiming(product, variant, _time_variant(device, product, variant))
            for variant in list_candidates(product)
        ]
        timings.sort(key=lambda timing: timing.seconds)
        tuned_variants(device)[product.key] = timings[0].variant
        yield timings


def _time_variant(device: Device, product: Product, variant: Variant) -> float:
    """Return the best of a few runs, without compilation."""
    m, n, k = product.m, product.n, product.k
    a = device.create_array((k, m) if product.trans_a else (m, k))
    b = device.create_array((n, k) if product.trans_b else (k, n), product.kind_b)
    c = device.create_array((m, n))
    graph = Graph(device)
    gemm(
        graph,
        a,
        b,
        c,
        m=m,
        n=n,
        k=k,
        trans_a=product.trans_a,
        trans_b=product.trans_b,
        variant=variant,
    )
    word = replace(c, shape=(1,))
    best = float("inf")
    try:
        for repeat in range(_REPEATS + 1):
            begin = time.perf_counter()
            graph.run()
            device.read(word)  # waits for the product
            if repeat > 0:
                best = min(best, time.perf_counter() - begin)
            if best > _SECONDS and repeat > 0:
                break
    finally:
        for array in (a, b, c, b.scales):
            if array is not None and array.buffer is not None:
                device.release(array.buffer)
    return best


def table_path(adapter: Adapter) -> Path:
    """Return the path of an adapter's table."""
    name = hashlib.sha256(adapter.key.encode()).hexdigest()[:16]
    return cache_root() / "wgpu" / f"gemm-{name}.json"


def save_table(device: Device) -> Path:
    """Write a device's table, whole or not at all, and return its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = table_path(device.adapter)
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {key: variant.name for key, variant in sorted(tuned_variants(device).items())}
    text = json.dumps({"adapter": device.adapter.key, "variants": table}, indent=1)
    write_atomically(path, f"{text}\n".encode(), mode=None)
    return path


def load_table(device: Device) -> None:
    """Load a device's table, if there is one; a damaged table is ignored."""
    path = table_path(device.adapter)
    known = {variant.name: variant for variant in ALL}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["adapter"] != device.adapter.key:
            raise ValueError("it is another adapter's")
        tuned = {key: known[name] for key, name in content["variants"].items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s: ignored, no table of variants: %r", path, error)
        return
    tuned_variants(device).update(tuned)
