"""The backends that compute a model, and what is true of each: the only table of them.

Standard library only: every host reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Backend = Literal["cuda", "wgpu", "cpu"]
RequestedBackend = Literal["auto", "cuda", "wgpu", "cpu"]
"""`auto` takes the first of the table that works."""


@dataclass(frozen=True)
class BackendFacts:
    """The properties of a backend."""

    is_gpu: bool
    """Whether it computes on a device of its own, with its own memory, that a flag names."""
    has_torch: bool
    """Whether torch computes on it, and so whatever needs torch.distributed."""


BACKENDS: Mapping[Backend, BackendFacts] = {
    "cuda": BackendFacts(is_gpu=True, has_torch=True),
    "wgpu": BackendFacts(is_gpu=True, has_torch=False),
    "cpu": BackendFacts(is_gpu=False, has_torch=True),
}
"""In the order in which they are tried."""
TORCH_BACKENDS = tuple(name for name, facts in BACKENDS.items() if facts.has_torch)
"""Those on which torch computes."""
