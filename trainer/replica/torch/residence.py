"""Decide which layers of a frozen base stay in memory: by `model.resident`, or by memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from trainer.config.run import RunConfig
from trainer.model.families import explain_transformers_only
from trainer.model.safetensors_headers import read_config
from trainer.planning.model_config import read_shape
from trainer.planning.replica import MemoryPlan, can_stream, fits_device
from trainer.planning.resident_layers import choose_resident
from trainer.system.errors import InputError

log = logging.getLogger(__name__)


def plan_residents(
    model_dir: Path,
    config: RunConfig,
    device: str,
    plan: Callable[[int | None], MemoryPlan],
    available: int,
) -> MemoryPlan:
    """Return the plan of a replica with the resident layers of its config, and log how many.

    Args:
        plan: returns that of a number of resident layers; None: those of the config.
        available: bytes before loading.

    Raises:
        InputError: the config sets a number, and this model keeps all.
    """
    asked, shape = config.model.resident, read_shape(model_dir)
    layers, why = shape.layers, None
    if shape.experts == 1:
        why = explain_transformers_only(read_config(model_dir), config.data.max_seq_len)
    if why and isinstance(asked, int):
        raise InputError(f"{model_dir}: model.resident {asked}: {why}; use all or auto")
    streams = not why and can_stream(config)
    found = plan(None)
    if streams:
        found = choose_resident(
            plan, layers, lambda some: fits_device(some, available, some.sample_tokens)
        )
    if found.resident is not None:
        log.info(
            "%s: %d of %d layers stay in memory, %d are read from %s at each use",
            device,
            found.resident,
            layers,
            layers - found.resident,
            model_dir,
        )
    return found


def reads_rows(config: RunConfig, *, tied: bool) -> bool:
    """Return whether a model with streamed layers needs rows of its embedding alone.

    Args:
        tied: the embedding is a language model's head, too.
    """
    is_head = tied and config.num_classes is None
    return not is_head and "embed_tokens" not in config.lora.modules_to_save
