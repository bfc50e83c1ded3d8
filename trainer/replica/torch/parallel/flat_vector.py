"""Between the parts that ranks hold and the flat vector of the layout.

Checkpoints, exports and the exchange speak the flat vector alone, whatever the strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.model.layout import GradientLayout, TensorSlot

PIECE = 1 << 24
"""Elements that are sent at once: 64 MiB."""
Reading = Callable[[TensorSlot, int, np.ndarray], None]
"""Fills contiguous fp32 `[n]` with a tensor's elements from the given one on."""


def gather_vector(
    layout: GradientLayout,
    parts: Mapping[str, Tensor | None],
    owners: Mapping[str, int] | None = None,
) -> np.ndarray | None:
    """Return fp32 `[layout.size]` on rank 0, None on the others; every rank calls this.

    Args:
        parts: this rank's parts by layout name; None is zero on all ranks.
        owners: of stages, which hold whole tensors: a rank that has it by each layout name.
    """
    flat = np.zeros(layout.size, np.float32) if dist.get_rank() == 0 else None
    for slot, whole in zip(
        layout.iter_tensors(), iterate_gathered(layout, parts, owners), strict=True
    ):
        if flat is not None and whole is not None:
            flat[slot.start : slot.stop] = whole
    return flat


def iterate_gathered(
    layout: GradientLayout,
    parts: Mapping[str, Tensor | None],
    owners: Mapping[str, int] | None = None,
) -> Iterator[np.ndarray | None]:
    """Yield the same one tensor at a time, fp32 `[slot.size]`, and None for zeros."""
    for slot in layout.iter_tensors():
        if owners is None:
            whole = _join_parts(parts[slot.name])
        else:
            whole = _send_to_first(slot, parts, owners[slot.name])
        if whole is None or dist.get_rank() > 0:
            yield None
        else:
            yield whole.cpu().numpy().reshape(-1)


def _join_parts(part: Tensor | None) -> Tensor | None:
    """Return the whole of which every rank has a part."""
    if isinstance(part, DTensor):
        part = part.full_tensor()
    return None if part is None else part.detach()


def _send_to_first(
    slot: TensorSlot, parts: Mapping[str, Tensor | None], owner: int
) -> Tensor | None:
    """Return on rank 0 what its owner has."""
    rank, mine = dist.get_rank(), parts.get(slot.name)
    if rank == owner:
        assert mine is not None, slot.name
        if rank:
            dist.send(mine.detach(), 0)
        return mine.detach()
    if rank:
        return None
    device = next(part.device for part in parts.values() if part is not None)
    received = torch.empty(slot.shape, dtype=torch.float32, device=device)
    dist.recv(received, owner)
    return received


def scatter_tensors(
    layout: GradientLayout, whole: Callable[[TensorSlot], np.ndarray], parts: Mapping[str, Tensor]
) -> None:
    """Copy tensors, the same on every rank, into the ranks' parts, one at a time.

    Args:
        whole: returns fp32 `[slot.size]`; it is asked for what this rank has a part of.
    """
    for slot in layout.iter_tensors():
        if slot.name in parts:  # else another stage's
            _copy_rows(slot, torch.from_numpy(whole(slot)), parts[slot.name])


def broadcast_tensors(
    layout: GradientLayout, read: Reading | None, parts: Mapping[str, Tensor]
) -> None:
    """Copy what rank 0 reads into the parts of all ranks; every rank calls this.

    A rank holds `PIECE` elements at a time beside its parts, or one row that is longer.

    Args:
        read: None on the other ranks.
    """
    for slot in layout.iter_tensors():
        width = slot.size // slot.shape[0]
        rows = max(1, PIECE // width)
        for first in range(0, slot.shape[0], rows):
            count = min(rows, slot.shape[0] - first)
            # Torch's memory, not NumPy's: gloo's threads may be the last to let go of it.
            piece = torch.empty(count * width, dtype=torch.float32)
            if read is not None:
                read(slot, first * width, piece.numpy())
            dist.broadcast(piece, 0)
            if slot.name in parts:
                _copy_rows(slot, piece, parts[slot.name], first)


@torch.no_grad()
def _copy_rows(slot: TensorSlot, values: Tensor, part: Tensor, first: int = 0) -> None:
    """Copy into a part what it has of a tensor's rows from `first` on."""
    rows = values.view(-1, *slot.shape[1:])
    mine = local_part(part)
    if isinstance(part, DTensor):
        sizes, starts = compute_local_shape_and_global_offset(
            part.shape, part.device_mesh, part.placements
        )
        inner = tuple(slice(a, a + n) for a, n in zip(starts[1:], sizes[1:], strict=True))
        rows, begin, count = rows[(slice(None), *inner)], starts[0], sizes[0]
    else:
        begin, count = 0, slot.shape[0]
    start, stop = max(first, begin), min(first + len(rows), begin + count)
    if start < stop:
        mine[start - begin : stop - begin].copy_(rows[start - first : stop - first])


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_count(tensor: Tensor) -> int:
    """Return into how many parts a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
