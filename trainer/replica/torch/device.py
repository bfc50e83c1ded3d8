"""The CPU or a CUDA device, and its free memory."""

from __future__ import annotations

import logging

import torch

from trainer.planning.replica import fits_with_heap
from trainer.system.cgroups import free_memory
from trainer.system.errors import InputError
from trainer.system.malloc import return_freed_tensors

log = logging.getLogger(__name__)


def usable_device(name: str) -> torch.device:
    """Return a usable device.

    Raises:
        InputError: it is neither the CPU nor a CUDA device of this machine.
    """
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device(name)
    if kind != "cuda" or (index and not index.isdecimal()):
        raise InputError(f"device {name}: must be cpu or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise InputError(f"device {name}: torch sees {count} CUDA devices on this machine")
    return torch.device("cuda", int(index or 0))


def available_bytes(device: torch.device) -> int:
    """Return the bytes that a process could still take on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    import psutil

    return free_memory(psutil.virtual_memory().available)


def spare_memory(device: torch.device, needed: int, available: int) -> None:
    """Let freed tensors leave this process at once if its memory is short: slower, but exact.

    Args:
        needed: bytes of all that is in use at the peak of a step.
        available: bytes before loading.
    """
    if device.type == "cpu" and not fits_with_heap(needed, available):
        log.info("%s: memory is short: freed memory goes back at once, which slows steps", device)
        return_freed_tensors()
