"""The CPU or a CUDA device, its free memory, and the errors of one that has too little."""

from __future__ import annotations

import torch

from trainer.errors import InputError

_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "CUDA out of memory")
"""What torch's allocator of host memory says, a file that is mapped, and CUDA libraries."""


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

    return psutil.virtual_memory().available


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or in the host's memory."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or any(sign in str(error) for sign in _OF_MEMORY)
