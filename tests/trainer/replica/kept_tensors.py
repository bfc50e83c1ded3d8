"""What autograd keeps for the backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def kept_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes of the storages that autograd saves while something is computed."""
    sizes: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # or its address would be given out again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(sizes.values())
