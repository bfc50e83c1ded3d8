"""Checks of what a script's functions return and do."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.config.script import Script
from trainer.data.metrics import MOST_FIGURES, check_figure_name
from trainer.replica.script.opened import OpenedScript
from trainer.system.errors import InputError

_LossSum = tuple[float, int]
"""A loss and what a mean divides it by."""
_TOLERANCE = 1e-3
"""Of the sum: other sizes of a batch round products otherwise, bf16's by this much."""


def check_loss(script: Script, found: Any) -> tuple[Tensor, int]:
    """Return what `loss` returned.

    Raises:
        InputError: it is no scalar tensor and a whole number.
    """
    match found:
        case (Tensor() as loss, int() as divisor) if loss.dim() == 0 and divisor >= 0:
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise InputError(
                    f"{script.path}: loss: has no gradient; compute it from the model's output"
                )
            return loss, int(divisor)
    raise InputError(
        f"{script.path}: loss: must return a tensor without dimensions, the sum over the samples,"
        f" and a whole number, what a mean divides by; it returned {_describe(found)}"
    )


def check_sum(
    opened: OpenedScript,
    both: tuple[float, int],
    first: tuple[float, int],
    second: tuple[float, int],
) -> None:
    """Check that the loss of some samples is the sum of those of their halves.

    What is not finite is found by the run. With local buffers only a mean is
    refused: batch norm makes samples depend on each other.

    Raises:
        InputError: it is a mean, or depends on which samples are together.
    """
    total, parts = both[0], first[0] + second[0]
    scale = abs(first[0]) + abs(second[0])
    if not math.isfinite(total + parts):
        return
    is_sum = both[1] == first[1] + second[1] and _are_close(total, parts, scale)
    is_mean = not is_sum and _are_close(total, parts / 2, scale)
    if is_sum or (opened.has_local_buffers and both[1] == first[1] + second[1] and not is_mean):
        return
    raise InputError(
        f"{opened.script.path}: loss: {'is a mean' if is_mean else 'is no sum over the samples'}:"
        f" four samples have {total:.6g} / {both[1]} together, {first[0]:.6g} / {first[1]} and"
        f" {second[0]:.6g} / {second[1]} in halves; return the sum, and what belongs together as"
        " one sample"
    )


def check_figures(script: Script, found: Any) -> dict[str, float]:
    """Return what `metrics` returned, as numbers.

    Raises:
        InputError: it is no short mapping of names to finite numbers.
    """
    try:
        figures = {name: float(value) for name, value in dict(found).items()}
    except (TypeError, ValueError):
        raise InputError(
            f"{script.path}: metrics: must return names with numbers, sums over the samples; it"
            f" returned {_describe(found)}"
        ) from None
    for name, value in figures.items():
        try:
            check_figure_name(str(name))
        except ValueError as error:
            raise InputError(f"{script.path}: metrics: {error}") from None
        if not math.isfinite(value):
            raise InputError(f"{script.path}: metrics: {name} is {value}")
    if len(figures) > MOST_FIGURES:
        raise InputError(
            f"{script.path}: metrics: {len(figures)} figures; at most {MOST_FIGURES} are recorded"
        )
    return figures


def read_random_state(device: torch.device, *, whole: bool = False) -> list[Any]:
    """Return the state of torch's random numbers; `whole`: of Python's and NumPy's too."""
    states: list[Any] = [torch.get_rng_state().numpy().tobytes()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    if whole:
        numbers = np.random.get_state(legacy=False)["state"]
        # A draw moves the position alone, until the block of numbers is used up.
        states += [random.getstate(), numbers["key"].tobytes(), numbers["pos"]]
    return states


def check_random_state(opened: OpenedScript, device: torch.device, before: list[Any]) -> None:
    """Check that no random number was drawn: with other shares others would be.

    Raises:
        InputError: some were; names the module that did.
    """
    if read_random_state(device, whole=len(before) > 2) == before:
        return
    names = [
        f"{name} ({type(module).__name__})"
        for name, module in opened.model.named_modules()
        if module.training and getattr(module, "p", 0) and "Dropout" in type(module).__name__
    ]
    who = f"module {names[0]}" if names else "loss or dataset"
    raise InputError(
        f"{opened.script.path}: {who} draws random numbers, which would depend on how a step is"
        " shared; set its probability to 0 or the model to eval(), and draw what data needs from"
        " the sample's index"
    )


def check_buffers(opened: OpenedScript, before: Mapping[str, Tensor]) -> None:
    """Check that a loss changed no buffer, or that they are each worker's own.

    Raises:
        InputError: it did; names the buffer.
    """
    if opened.has_local_buffers:
        return
    for name, buffer in opened.model.named_buffers():
        if not torch.equal(buffer, before[name]):
            raise InputError(
                f"{opened.script.path}: loss changes the buffer {name}, which no worker shares:"
                " take a layer without running statistics, such as GroupNorm, or write"
                ' buffers = "local" if each worker may have its own'
            )


def _are_close(one: float, other: float, scale: float) -> bool:
    return abs(one - other) <= _TOLERANCE * scale + 1e-6


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    return type(value).__name__
