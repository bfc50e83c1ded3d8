"""Keys and values of a teacher's layers on a spare Vulkan device, if it attends to them faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.planning.vulkan_buffers import KVShape
from trainer.replica.backend import UnusableError, open_vulkan_device
from trainer.replica.torch.cache import KVCache, LayerStore
from trainer.replica.wgpu.gpu.errors import DeviceError
from trainer.system.errors import InputError

if TYPE_CHECKING:
    from trainer.distill.answers.author import Generate
    from trainer.replica.torch.generator import TorchGenerator
    from trainer.replica.wgpu.generation.kv_store import KVStore
    from trainer.replica.wgpu.gpu.device import Device

log = logging.getLogger(__name__)

_REPEATS = 5


@dataclass(frozen=True)
class KVOffload:
    """A request to keep keys and values on a Vulkan device."""

    gpu: str
    """An index, PCI address or name; empty for the first GPU."""
    answers: int
    """Those of the largest shard."""
    slots: int
    """Tokens of the longest prompt and its answer."""
    layers: int | None = None
    """How many; None for those that fit."""
    even_if_slower: bool = False

    @property
    def name(self) -> str:
        """The option as it was given."""
        return f"--kv-offload wgpu:{self.gpu}"


def open_device(wanted: KVOffload) -> Device:
    """Open the device.

    Raises:
        InputError: it is not available.
    """
    try:
        return open_vulkan_device(wanted.gpu, allow_software=bool(wanted.gpu))
    except UnusableError as error:
        raise InputError(f"{wanted.name}: {error}") from None


def count_fitting(
    wanted: KVOffload, device: Device, shape: KVShape, layers: Sequence[int], rows: int
) -> int:
    """Return of how many of some layers the keys and values fit the device.

    Args:
        rows: the most answers that are written together.
    """
    from trainer.replica.wgpu.generation.kv_store import count_fitting_layers

    fitting = count_fitting_layers(device, shape, rows, wanted.slots)
    return len(layers) if fitting is None else min(fitting, len(layers))


def open_store(
    wanted: KVOffload,
    device: Device,
    shape: KVShape,
    layers: Sequence[int],
    rows: int,
    like: Tensor,
) -> KVStore:
    """Make room on a device for the first of some layers.

    Args:
        layers: numbers of the layers that may be kept there.
        rows: the most answers that are written together.
        like: has the dtype and the device of the model's keys and values.

    Raises:
        InputError: the device has no room, or attends more slowly.
    """
    from trainer.replica.wgpu.generation.kv_store import KVStore

    where, size = wanted.name, f"{rows} answers of {wanted.slots} tokens with their prompts"
    room = count_fitting(wanted, device, shape, layers, rows)
    count = min(wanted.layers or max(1, room), len(layers))
    if count > room:
        raise InputError(
            f"{where}: keys and values of {room} of {len(layers)} layers fit, for {size}; lower"
            " --kv-layers, --batch or --max-new-tokens"
        )
    store = KVStore(device, shape, layers[:count])
    try:
        store.begin(rows, wanted.slots)
        there = step_seconds(shape, rows, wanted.slots, like, store)
    except DeviceError as error:
        raise InputError(f"{where}: {error}; lower --kv-layers or --batch") from None
    here = step_seconds(shape, rows, wanted.slots, like)
    figures = (
        f"a layer's attention takes {1e3 * there:.2f} ms a token there and {1e3 * here:.2f} ms on"
        f" {like.device}, for {size}"
    )
    if there > here and not wanted.even_if_slower:
        raise InputError(
            f"{where}: {device.adapter.name} is refused because it is slower: {figures}; leave it"
            " out, or force it with --kv-even-if-slower"
        )
    log.info("%s: keys and values of %d of %d layers; %s", where, count, len(layers), figures)
    return store


def step_seconds(
    shape: KVShape, batch: int, slots: int, like: Tensor, store: LayerStore | None = None
) -> float:
    """Return the least seconds of a layer's attention of one token a row to all slots.

    Args:
        store: has room for them; None for the attention of `Cache` itself.
    """

    def make_ones(heads: int, length: int) -> Tensor:
        return torch.ones((batch, heads, length, shape.head_dim)).to(like)

    layer = 0 if store is None else min(store.layers)
    cache, best = KVCache(slots, store), float("inf")
    prompts, new = make_ones(shape.num_kv_heads, slots - 1), make_ones(shape.num_kv_heads, 1)
    queries = make_ones(shape.num_heads, 1)
    cache.advance(None, slots - 1)
    cache.attend(layer, prompts, prompts, prompts)
    cache.advance(torch.full((batch, 1), slots - 1, device=like.device), 1)
    for _ in range(_REPEATS):
        began = time.perf_counter()
        mixed = cache.attend(layer, queries, new, new)
        assert mixed is not None, "a token attends"
        mixed.cpu()  # waits
        best = min(best, time.perf_counter() - began)
    return best


def with_fallback(generator: TorchGenerator, batch_alone: int) -> Generate:
    """Return what continues prompts: without the generator's store once its device fails.

    Args:
        batch_alone: prompts that are continued together without it; 0: not one fits.
    """

    def generate(prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        if generator.store is not None:
            try:
                return generator.generate(prompts, **options)
            except DeviceError as error:
                if not batch_alone:
                    raise InputError(
                        f"{error}; keys and values do not fit {generator.device}: start again, or"
                        " ask for fewer tokens"
                    ) from None
                log.warning(
                    "%s; keys and values are on %s from here on, and the shard's answers are"
                    " written again",
                    error,
                    generator.device,
                )
                generator.store = None
                generator.batch = min(generator.batch, batch_alone)
        return generator.generate(prompts, **options)

    return generate
