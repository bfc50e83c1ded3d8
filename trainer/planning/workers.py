"""The memory that a worker needs by its backend, the same figure for every program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainer.config.capabilities import explain_refusal
from trainer.config.codec import largest_codec
from trainer.config.exchange import ExchangeConfig
from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.families import explain_transformers_only
from trainer.model.family import SavedActivations
from trainer.model.layout import GradientLayout, build_layout
from trainer.model.safetensors_headers import TensorHeader, read_config, read_headers
from trainer.planning import replica, vulkan
from trainer.planning.device_models import DeviceModel
from trainer.planning.model_config import read_shape
from trainer.planning.replica import (
    BUSY_TOKENS,
    MemoryPlan,
    can_stream,
    choose_streamed,
    plan_memory,
    share_head_reads,
)
from trainer.planning.resident_layers import resolve_resident, stream_head
from trainer.planning.shapes import ModelShape
from trainer.planning.vulkan_buffers import padded_length
from trainer.system.backends import BACKENDS, Backend


@dataclass(frozen=True)
class Room:
    """The memory that one worker may take."""

    memory: int
    """Bytes."""
    backend: Backend
    coordinates: bool = False
    """The worker's process is the run's coordinator too."""

    @property
    def usable(self) -> int:
        """Bytes that a plan may fill; the rest is for fragmentation, drivers and libraries."""
        share = vulkan.USABLE if self.backend == "wgpu" else replica.USABLE
        return int(self.memory * share)


def device_room(device: DeviceModel) -> Room:
    """Return the memory of a device of a planned cluster."""
    return Room(int(device.memory), device.backend)


@dataclass(frozen=True)
class RunMemory:
    """A run as far as memory depends on it; read from headers."""

    model: ModelShape
    architecture: Architecture | None
    """None if wgpu does not compute the run, for the reason `not_on_wgpu`."""
    not_on_wgpu: str | None
    headers: Mapping[str, TensorHeader]
    layout: GradientLayout
    config: RunConfig

    @classmethod
    def of_model_folder(cls, folder: Path, config: RunConfig) -> RunMemory:
        """Return the memory of a run on a model folder.

        Raises:
            InputError: the model cannot be used, or does not fit the config.
        """
        layout = build_layout(folder, config)
        foreign = explain_transformers_only(read_config(folder), config.data.max_seq_len)
        reason = foreign or explain_refusal(config, "wgpu")
        shape = read_shape(folder)
        if foreign:  # of a family that Motley's decoder computes otherwise
            shape = replace(shape, kept=shape.kept or SavedActivations())
        return cls(
            shape,
            None if reason else read_architecture(folder),
            reason,
            read_headers(folder),
            layout,
            config,
        )

    def needed_bytes(
        self,
        backend: Backend,
        tokens: int = 0,
        *,
        coordinates: bool = False,
    ) -> int:
        """Return the bytes that a worker needs for micro-batches of `tokens`.

        One sample is the least. Activations are recomputed, as workers do where memory is short,
        unless the config forbids it.

        Args:
            coordinates: its process is the run's coordinator too.
        """
        if backend == "wgpu" and self.architecture is not None:
            recompute = self.config.training.recompute is not False
            samples = max(1, -(-tokens // padded_length(self.config.data.max_seq_len)))
            parts = vulkan.plan_vulkan_memory(
                self.architecture, self.layout, self.config, samples, recompute=recompute
            )
            return sum(parts.values())
        plan = self.plan_resident(backend, coordinates=coordinates)
        return plan.fixed + plan.per_token * max(tokens, plan.sample_tokens)

    def plan_worker(self, backend: Backend, room: float) -> MemoryPlan:
        """Return the plan of a worker that may fill so many bytes, with the layers that stay.

        If it does not fit, it is the one that needs least.
        """
        plan = partial(self.plan_resident, backend)
        found = plan(None)
        if self.may_stream:
            found = choose_streamed(plan, self.model.layers, self.config, room)
        if found.resident == 0:
            found = stream_head(found, plan, lambda some: some.least, room)
        on_vulkan = backend == "wgpu" and self.architecture is not None
        return found if on_vulkan else share_head_reads(found, self.model, self.config, room)

    @property
    def may_stream(self) -> bool:
        """Whether its workers may read layers at each use, by `model.resident: auto`."""
        return can_stream(self.config)

    def plan_resident(
        self, backend: Backend, resident: int | None = None, *, coordinates: bool = False
    ) -> MemoryPlan:
        """Return the plan of a worker with so many layers that stay.

        Args:
            resident: None: those of `model.resident`, which `auto` leaves at all.
            coordinates: its process is the run's coordinator too.
        """
        if backend == "wgpu" and self.architecture is not None:
            return self._plan_vulkan_worker(self.architecture, resident)
        return plan_memory(
            self.model,
            self.headers,
            self.layout,
            self.config,
            accelerator=BACKENDS[backend].is_gpu,
            recompute=self.config.training.recompute is not False,
            coordinates=coordinates,
            resident=resident,
        )

    def _plan_vulkan_worker(self, model: Architecture, resident: int | None) -> MemoryPlan:
        recompute = self.config.training.recompute is not False
        parts = vulkan.plan_vulkan_memory(
            model, self.layout, self.config, recompute=recompute, resident=resident
        )
        tokens = padded_length(self.config.data.max_seq_len)
        waiting = parts.pop("waiting", 0)
        kept = parts.pop("activations") + parts.pop("checkpoints", 0) + waiting
        own = {name: parts.pop(name) for name in ("frozen", "trainable", "gradients")}
        return MemoryPlan(
            **own,
            state=0,
            workspace=sum(parts.values()),
            per_token=math.ceil(kept / tokens),
            per_waiting_token=math.ceil(waiting / tokens),
            waits_on_host=False,
            sample_tokens=tokens,
            recompute=recompute,
            resident=resolve_resident(self.config.model.resident, model.num_layers, resident),
        )

    def fits_room(self, room: Room, *, busy: bool = False) -> bool:
        """Return whether a worker fits a room; `busy`: so that an accelerator is kept busy."""
        tokens = BUSY_TOKENS if busy and BACKENDS[room.backend].is_gpu else 0
        needed = self.needed_bytes(room.backend, tokens, coordinates=room.coordinates)
        return needed <= room.usable


def coordinator_memory(layout: GradientLayout, workers: int, exchange: ExchangeConfig) -> int:
    """Return the most bytes of a coordinator: when the gradient of the first worker comes last.

    Beside weights and two moments the gradients of all others wait, in fp32 one of them where the
    sum will be. Two blocks are on their way. Those of the coordinator's host
    wait in shared memory. It is more only while a worker joins, or a checkpoint is written, as the
    run goes on.
    """
    if exchange.has_rounds:
        return 4 * layout.size * (workers + 3)
    each = 12 + largest_codec(exchange.codec).element_bytes * max(1, workers - 1)
    return math.ceil(each * layout.size) + 2 * 4 * max(block.size for block in layout.blocks)
