"""Device memory by purpose, reused while recording, which keeps it small.

A queue runs in order, so a later dispatch may write where an earlier one has finished reading. A
pool without a device records the same way and allocates nothing: its budget is exact.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from trainer.planning.vulkan import USABLE
from trainer.planning.vulkan_buffers import NF4_BLOCK, Kind, align_size, tensor_bytes
from trainer.replica.wgpu.gpu.array import Array
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.vulkan_adapter import Adapter
from trainer.system import pci
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError

Purpose = Literal[
    "frozen",
    "trainable",
    "gradients",
    "checkpoints",
    "waiting",
    "activations",
    "logits",
    "workspace",
    "input",
]


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes on the device by purpose."""

    parts: dict[Purpose, int]

    @property
    def total(self) -> int:
        """Bytes together."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        large = {
            purpose: size for purpose, size in self.parts.items() if _format_gib(size) != "0.0"
        }
        listed = ", ".join(f"{purpose} {_format_gib(size)}" for purpose, size in large.items())
        return f"{_format_gib(self.total)} GiB" + (f" ({listed})" if listed else "")


class MemoryPool:
    """Memory of one device, or the plan of it.

    Memory is reused for the same purpose alone: a small long-lived array must not occupy a large
    temporary one.

    Args:
        device: of the memory; None plans only.
    """

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self._allocated: Counter[Purpose] = Counter()
        self._wholes: list[Array] = []
        self._taken: dict[int, tuple[Array, Array, Purpose]] = {}
        """By the id of the taken array: that array, the whole allocation, its purpose."""
        self._free: dict[Purpose, list[Array]] = {purpose: [] for purpose in get_args(Purpose)}

    def take(
        self, shape: tuple[int, ...], kind: Kind = "f32", *, purpose: Purpose = "workspace"
    ) -> Array:
        """Return uninitialised memory: the smallest free piece that is large enough.

        Raises:
            OutOfMemoryError: it does not fit.
        """
        size = tensor_bytes(shape, kind)
        free = self._free[purpose]
        fitting = [piece for piece in free if piece.nbytes >= size]
        if fitting:
            whole = min(fitting, key=lambda piece: piece.nbytes)
            free[:] = [piece for piece in free if piece is not whole]
        else:
            whole = self._allocate(align_size(size), purpose)
        scales = None
        if kind == "nf4":
            blocks = -(-Array(None, shape).size // NF4_BLOCK)
            scales = self.take((blocks,), purpose=purpose)
        array = Array(whole.buffer, shape, kind, scales=scales)
        self._taken[id(array)] = array, whole, purpose
        return array

    def give_back(self, array: Array) -> None:
        """Free an array that `take` returned, not a window of one, for later takes."""
        assert id(array) in self._taken, f"{array.shape} was not taken here, or was given already"
        _, whole, purpose = self._taken.pop(id(array))
        if array.scales is not None:
            self.give_back(array.scales)
        self._free[purpose].append(whole)

    def release(self) -> None:
        """Free all memory on the device, taken or not; the pool is empty afterwards."""
        for whole in self._wholes:
            if self.device is not None and whole.buffer is not None:
                self.device.release(whole.buffer)
        self._wholes.clear()
        self._allocated.clear()
        self._taken.clear()
        for free in self._free.values():
            free.clear()

    def report_budget(self) -> MemoryBudget:
        """Return the allocated bytes; until a `release` they only grow, so they are the peak."""
        return MemoryBudget(dict(self._allocated))

    def _allocate(self, size: int, purpose: Purpose) -> Array:
        whole = Array(None, (size // 4,))
        if self.device is not None:
            whole = self.device.create_array(whole.shape)
        self._allocated[purpose] += size
        self._wholes.append(whole)
        return whole


def measure_available_memory(adapter: Adapter, devices: Path = pci.DEVICES) -> int | None:
    """Return the free bytes of the memory of an adapter's buffers; None if not reported.

    A software or integrated adapter has the machine's memory.
    """
    if adapter.kind in ("software", "integrated"):
        return free_memory(psutil.virtual_memory().available)
    return pci.free_memory(adapter.address, devices) if adapter.address else None


def check_fits(budget: MemoryBudget, there: int, device: str, smaller: str) -> None:
    """Refuse a budget that exceeds a device's memory.

    Args:
        smaller: what needs less, in words.

    Raises:
        InputError: names the needed and the available memory.
    """
    if budget.total > there * USABLE:
        raise InputError(
            f"{device}: the run needs {budget}, {_format_gib(there)} are free; use {smaller}"
        )


def _format_gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
