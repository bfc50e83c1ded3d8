"""Decide which layers of a frozen base stay in memory: as it was asked for, or by memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from trainer.config.run import Resident, RunConfig
from trainer.model.families import explain_transformers_only
from trainer.model.layout import GradientLayout
from trainer.model.safetensors_headers import read_config
from trainer.planning.devices import format_gib
from trainer.planning.forward import ForwardPlan, ForwardSize, plan_forward, used_setup
from trainer.planning.model_config import read_shape
from trainer.planning.replica import USABLE, MemoryPlan, can_stream, choose_streamed
from trainer.planning.resident_layers import HEAD_STREAMED, choose_resident, stream_head
from trainer.planning.strategy import TrainingSetup
from trainer.replica.torch.device import available_bytes, spare_memory
from trainer.system.errors import InputError

log = logging.getLogger(__name__)


class _Planned(Protocol):
    @property
    def resident(self) -> int | None: ...


_Plan = TypeVar("_Plan", bound=_Planned)


def choose_residents(
    model_dir: Path,
    asked: Resident,
    device: str,
    plan: Callable[[int | None], _Plan],
    choose: Callable[[int], _Plan],
    size: Callable[[_Plan], int],
    usable: float,
    length: int,
) -> _Plan:
    """Return the plan with the layers that are asked to stay, and log how many do.

    Args:
        plan: returns that of a number of resident layers; None: all.
        choose: returns the plan of so many layers where `auto` is asked.
        size: returns the bytes of a plan.
        usable: bytes of the device that it may fill.
        length: the most tokens of a row.
    """
    layers = read_shape(model_dir).layers
    if isinstance(asked, int):
        found = plan(asked if asked < layers else None)
    elif asked == "all":
        found = plan(None)
    else:
        found = choose(layers)
    if found.resident == 0 and not explain_transformers_only(read_config(model_dir), length):
        found = stream_head(found, plan, size, usable)
    if found.resident is not None:
        stay = max(0, found.resident)
        log.info(
            "%s: %d of %d layers stay in memory, %d are read from %s at each use%s",
            device,
            stay,
            layers,
            layers - stay,
            model_dir,
            ", and so is the head" if found.resident == HEAD_STREAMED else "",
        )
    return found


def plan_residents(
    model_dir: Path,
    config: RunConfig,
    device: str,
    plan: Callable[[int | None], MemoryPlan],
    available: int,
    *,
    evaluates: bool = False,
) -> MemoryPlan:
    """Return the plan of a replica with the resident layers of its config, and log how many.

    Args:
        plan: returns that of a number of resident layers; None: all.
        available: bytes before loading.
        evaluates: nothing is trained.
    """
    asked = config.model.resident
    return choose_residents(
        model_dir,
        asked if isinstance(asked, int) or can_stream(config, evaluates=evaluates) else "all",
        device,
        plan,
        lambda layers: choose_streamed(plan, layers, config, available * USABLE),
        lambda some: some.least,
        available * USABLE,
        config.data.max_seq_len,
    )


def plan_generation(
    model_dir: Path, config: RunConfig, layout: GradientLayout, device: torch.device, batch: int
) -> tuple[int | None, int]:
    """Return `plan_answers` of a trained model, whose prompts have `data.max_seq_len` tokens.

    Raises:
        InputError: see `plan_answers`.
    """
    setup = used_setup(config, layout.size, accelerator=device.type == "cuda")
    length, asked = config.data.max_seq_len, config.model.resident
    return plan_answers(model_dir, setup, asked, length, device, batch)


def plan_answers(
    model_dir: Path,
    setup: TrainingSetup,
    asked: Resident,
    length: int,
    device: torch.device,
    batch: int,
) -> tuple[int | None, int]:
    """Return the layers that stay while prompts are continued, and how many prompts at once.

    Where layers are read at each use, memory is left for `batch` prompts first: each layer is read
    once for all of them.

    Args:
        length: tokens of a prompt with the new ones.

    Raises:
        InputError: one prompt does not fit.
    """
    shape, cuda = read_shape(model_dir), device.type == "cuda"
    available = available_bytes(device)
    usable = available * USABLE

    def plan(resident: int | None, rows: int) -> ForwardPlan:
        size = ForwardSize(rows * length, length, rows * length)
        return plan_forward(shape, setup, size, resident, accelerator=cuda)

    def plan_batch(resident: int | None) -> ForwardPlan:
        return plan(resident, 1 if resident is None else batch)

    chosen = choose_residents(
        model_dir,
        asked,
        str(device),
        plan_batch,
        lambda layers: choose_resident(plan_batch, layers, lambda some: some.total <= usable),
        lambda some: some.total,
        usable,
        length,
    ).resident
    one, two = plan(chosen, 1), plan(chosen, 2)
    if one.total > usable:
        fewer = "ask for fewer tokens"
        ways = fewer if chosen in (0, HEAD_STREAMED) else f"use --resident auto, or {fewer}"
        raise InputError(
            f"{device}: {model_dir} needs {format_gib(one.total)} GiB to continue a prompt to"
            f" {length} tokens, {format_gib(usable)} may be used; {ways}"
        )
    batch = max(1, min(batch, 1 + int(usable - one.total) // (two.total - one.total)))
    spare_memory(device, plan(chosen, batch).total, available)
    return chosen, batch


def reads_rows(config: RunConfig, *, tied: bool) -> bool:
    """Return whether a model with streamed layers needs rows of its embedding alone.

    Args:
        tied: the embedding is a language model's head, too.
    """
    is_head = tied and config.num_classes is None
    return not is_head and "embed_tokens" not in config.lora.modules_to_save
