"""Memory and micro-batch of a replica, planned before anything is loaded (F-HET-002)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from trainer.config.run import RunConfig
from trainer.model.architecture import Architecture, read_architecture
from trainer.model.layout import GradientLayout
from trainer.planning.replica import GROUP_TOKENS, can_stream, suggest_smaller
from trainer.planning.resident_layers import choose_group
from trainer.planning.vulkan import USABLE, plan_vulkan_memory
from trainer.planning.vulkan_buffers import padded_length
from trainer.replica.microbatch import MicroBatchLimit
from trainer.replica.residence import choose_residents
from trainer.replica.wgpu.gpu.device import Device
from trainer.replica.wgpu.gpu.pool import (
    MemoryBudget,
    Purpose,
    check_fits,
    measure_available_memory,
)
from trainer.replica.wgpu.loaded_model import Residence, freeze_weights
from trainer.system.errors import InputError

_TOKENS = 8192
"""The most tokens of an automatic micro-batch: more keep no GPU busier."""
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan of a replica."""

    budget: MemoryBudget
    limit: MicroBatchLimit
    recompute: bool
    """Keep layer inputs and compute the rest twice."""
    resident: int | None
    """Layers whose frozen linears stay on the device; None: all."""
    group_tokens: int
    """The most tokens of a group, which runs layer by layer; it has at least one micro-batch."""


def plan_replica(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    device: Device,
    *,
    evaluates: bool = False,
) -> ReplicaPlan:
    """Return the plan of a model on a device, and log how many layers stay if not all do.

    Layers are computed twice before one is read at each use.

    Args:
        evaluates: nothing is trained.

    Raises:
        InputError: one sample does not fit.
    """
    if evaluates:
        config, layout = freeze_weights(model_dir, config, layout)
    there = measure_available_memory(device.adapter)
    of = partial(plan_memory, model_dir, config, layout, evaluates=evaluates)
    recompute, asked = config.training.recompute, config.model.resident
    choices = (False, True) if recompute is None else (recompute,)
    longest = padded_length(config.data.max_seq_len)
    most = min(config.training.batch_size, max(1, GROUP_TOKENS // longest))

    def fits_device(found: Residence) -> bool:
        return there is None or found.budget.total <= there * USABLE

    def plan(some: int | None) -> Residence:
        tried = [Residence(some, of(1, recompute=again, resident=some), again) for again in choices]
        return next(filter(fits_device, tried), tried[-1])

    def plan_group(micros: int, some: int | None) -> Residence:
        if some is None:
            return plan(None)
        others = (micros - 1) * longest
        budget = of(1, recompute=choices[-1], resident=some, waiting=others)
        return Residence(some, budget, choices[-1], others)

    resident, needed, again, waiting = choose_residents(
        model_dir,
        asked if isinstance(asked, int) or can_stream(config) else "all",
        f"wgpu:{device.adapter.index}",
        plan,
        lambda layers: choose_group(
            plan_group,
            layers,
            most,
            lambda _, found: fits_device(found),
            lambda found: found.resident,
        ),
        size=lambda found: found.budget.total,
        usable=math.inf if there is None else there * USABLE,
    )
    if there is not None:
        smaller = suggest_smaller(config, resident, recompute=again, evaluates=evaluates)
        check_fits(needed, there, device.adapter.name, smaller)
    wanted = config.training.micro_batch_size
    tokens = _max_bindable_tokens(model_dir, config, device)
    group = 0 if resident is None else GROUP_TOKENS
    if there is not None:
        total = partial(of, recompute=again, resident=resident)
        one, two = (total(samples, waiting=waiting).total for samples in (1, 2))
        spare = max(0, int(there * USABLE) - one)  # for what further samples take
        fitting = 1 + spare // max(1, two - one)
        tokens = min(tokens, fitting * longest)
        if resident is not None:
            samples = max(1, min(tokens // longest, _UNBOUNDED if wanted == "auto" else wanted))
            alone, more = (total(samples, waiting=others).total for others in (0, longest))
            spare = max(0, int(there * USABLE) - alone)
            group = longest * (samples + spare // (more - alone))
    limit = (
        MicroBatchLimit(_UNBOUNDED, tokens) if wanted == "auto" else MicroBatchLimit(wanted, tokens)
    )
    return ReplicaPlan(needed, limit, again, resident, group)


def plan_memory(
    model_dir: Path,
    config: RunConfig,
    layout: GradientLayout,
    samples: int,
    *,
    recompute: bool,
    evaluates: bool = False,
    resident: int | None = None,
    waiting: int = 0,
) -> MemoryBudget:
    """Return the memory of a replica whose micro-batches hold `samples` of the longest samples.

    Args:
        resident: layers whose frozen linears stay; None: those of `model.resident`.
        waiting: tokens of the other micro-batches of a group.
    """
    model = read_architecture(model_dir)
    parts = plan_vulkan_memory(
        model,
        layout,
        config,
        samples,
        recompute=recompute,
        evaluates=evaluates,
        resident=resident,
        waiting=waiting,
    )
    return MemoryBudget(cast("dict[Purpose, int]", parts))


def _max_bindable_tokens(model_dir: Path, config: RunConfig, device: Device) -> int:
    """Return the most tokens whose widest activation fits one kernel argument.

    Raises:
        InputError: not even one sample fits.
    """
    widest = widest_activation(read_architecture(model_dir))
    longest = padded_length(config.data.max_seq_len)
    tokens = device.binding_limit // (4 * widest)
    if tokens < longest:
        raise InputError(
            f"{device.adapter.name}: a sample of {longest} tokens exceeds the"
            f" {device.binding_limit >> 20} MiB that a kernel's argument may span; lower"
            " data.max_seq_len"
        )
    return min(tokens, _TOKENS)


def widest_activation(architecture: Architecture) -> int:
    """Return the columns of the widest activation."""
    return max(
        architecture.intermediate_size,
        architecture.hidden_size,
        architecture.num_heads * architecture.head_dim,
    )
