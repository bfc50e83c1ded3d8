"""The memory that a worker needs by its backend, the same figure for every program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import TensorHeader
from trainer.planning import replica, vulkan
from trainer.planning.replica import BUSY_TOKENS, plan_memory
from trainer.planning.vulkan_buffers import padded_length

Backend = Literal["cuda", "wgpu", "cpu"]
MAIN_MEMORY = 0.75
"""Share of a host's main memory that its processes may use, where the free part is not known."""


@dataclass(frozen=True)
class Room:
    """The memory that one worker may take."""

    memory: int
    """Bytes."""
    backend: Backend

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill; the rest is for fragmentation, drivers and libraries."""
        share = vulkan.USABLE if self.backend == "wgpu" else replica.USABLE
        return int(self.memory * share)


@dataclass(frozen=True)
class RunMemory:
    """A run as far as memory depends on it; read from headers."""

    model: Architecture
    headers: Mapping[str, TensorHeader]
    layout: GradientLayout
    config: RunConfig

    def needed(self, backend: Backend, tokens: int = 0) -> int:
        """Return the bytes that a worker needs for micro-batches of `tokens`.

        One sample is the least. Activations are recomputed, as workers do where memory is short,
        unless the config forbids it.
        """
        recompute = self.config.training.recompute is not False
        if backend == "wgpu":
            samples = max(1, -(-tokens // padded_length(self.config.data.max_seq_len)))
            parts = vulkan.plan_vulkan_memory(
                self.model, self.layout, self.config, samples, recompute=recompute
            )
            return sum(parts.values())
        is_card = backend == "cuda"
        plan = plan_memory(
            self.model, self.headers, self.layout, self.config,
            accelerator=is_card, recompute=recompute,
        )  # fmt: skip
        return plan.fixed + plan.per_token * max(tokens, plan.sample_tokens)

    def fits(self, room: Room, *, busy: bool = False) -> bool:
        """Return whether a worker fits a room; `busy`: so that an accelerator is kept busy."""
        tokens = BUSY_TOKENS if busy and room.backend != "cpu" else 0
        return self.needed(room.backend, tokens) <= room.usable


def coordinator_memory(layout: GradientLayout, workers: int) -> int:
    """Return the bytes of a coordinator: a gradient for each worker, and four more vectors.

    Those are weights, two moments and the sum; docs/benchmarks.md measures 4.2 to 5.2 vectors for
    three workers, and more only while one joins.
    """
    return 4 * layout.size * (workers + 4)
