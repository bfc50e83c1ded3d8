"""Plan which layers stay in the memory of torch's devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.config.run import Resident, RunConfig
from trainer.model.layout import GradientLayout
from trainer.planning.devices import format_gib
from trainer.planning.forward import ForwardPlan, ForwardSize, plan_forward, used_setup
from trainer.planning.model_config import read_shape
from trainer.planning.replica import (
    USABLE,
    MemoryPlan,
    can_stream,
    choose_streamed,
    share_head_reads,
)
from trainer.planning.resident_layers import HEAD_STREAMED, choose_resident
from trainer.planning.strategy import TrainingSetup
from trainer.replica.residence import choose_residents
from trainer.replica.torch.device import available_bytes, spare_memory
from trainer.system.errors import InputError


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
    found = choose_residents(
        model_dir,
        asked if isinstance(asked, int) or can_stream(config, evaluates=evaluates) else "all",
        device,
        plan,
        lambda layers: choose_streamed(plan, layers, config, available * USABLE),
        size=lambda some: some.least,
        usable=available * USABLE,
    )
    return share_head_reads(found, read_shape(model_dir), config, available * USABLE)


def plan_generation(
    model_dir: Path, config: RunConfig, layout: GradientLayout, device: torch.device, batch: int
) -> tuple[int | None, int]:
    """Return `plan_answers` of a trained model, whose prompts have `data.max_seq_len` tokens.

    Raises:
        InputError: see `plan_answers`.
    """
    setup = used_setup(config, layout.size, accelerator=device.type == "cuda")
    length, asked = config.data.max_seq_len, config.model.resident
    return plan_answers(model_dir, setup, asked, length, device, batch)[:2]


class AnswerPlan(NamedTuple):
    """How prompts are continued."""

    resident: int | None
    """Layers that stay; None: all."""
    batch: int
    """Prompts at once."""
    batch_alone: int
    """Prompts at once if the device is lost that keeps keys and values of layers; 0: not one."""


def plan_answers(
    model_dir: Path,
    setup: TrainingSetup,
    asked: Resident,
    length: int,
    device: torch.device,
    batch: int,
    elsewhere: int = 0,
) -> AnswerPlan:
    """Return the layers that stay while prompts are continued, and how many prompts at once.

    Where layers are read at each use, memory is left for `batch` prompts first: each layer is read
    once for all of them.

    Args:
        length: tokens of a prompt with the new ones.
        elsewhere: layers whose keys and values another device keeps.

    Raises:
        InputError: one prompt does not fit.
    """
    shape, cuda = read_shape(model_dir), device.type == "cuda"
    available = available_bytes(device)
    usable = available * USABLE

    def plan(resident: int | None, rows: int, elsewhere: int = elsewhere) -> ForwardPlan:
        size = ForwardSize(rows * length, length, rows * length, elsewhere)
        return plan_forward(shape, setup, size, resident, accelerator=cuda)

    def plan_batch(resident: int | None) -> ForwardPlan:
        return plan(resident, 1 if resident is None else batch)

    def count_prompts(elsewhere: int) -> int:
        one, two = (plan(chosen, rows, elsewhere).total for rows in (1, 2))
        return min(batch, max(0, 1 + int((usable - one) // (two - one))))

    chosen = choose_residents(
        model_dir,
        asked,
        str(device),
        plan_batch,
        lambda layers: choose_resident(plan_batch, layers, lambda some: some.total <= usable),
        size=lambda some: some.total,
        usable=usable,
    ).resident
    if not (fitting := count_prompts(elsewhere)):
        fewer = "ask for fewer tokens"
        ways = fewer if chosen in (0, HEAD_STREAMED) else f"use --resident auto, or {fewer}"
        raise InputError(
            f"{device}: {model_dir} needs {format_gib(plan(chosen, 1).total)} GiB to continue a"
            f" prompt to {length} tokens, {format_gib(usable)} may be used; {ways}"
        )
    spare_memory(device, plan(chosen, fitting).total, available)
    return AnswerPlan(chosen, fitting, count_prompts(0))


def reads_rows(config: RunConfig, resident: int | None, *, tied: bool) -> bool:
    """Return whether a model with streamed layers needs rows of its embedding alone.

    Args:
        tied: the embedding is a language model's head, too.
    """
    is_head = tied and config.num_classes is None and resident != HEAD_STREAMED
    return not is_head and "embed_tokens" not in config.lora.modules_to_save
