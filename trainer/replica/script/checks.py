"""Checks of what a script's functions return and do; a fault is reported as one of the script."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from trainer.data.metrics import MOST_FIGURES, Figures
from trainer.replica.script.user_script import ScriptFaultError

_TOLERANCE = 1e-3
"""Tolerance of the sum: other sizes of a batch round products otherwise, bf16's by this much."""


def check_loss(found: Any) -> tuple[Tensor, int]:
    """Return what `loss` returned, if it is a scalar tensor and a whole number."""
    match found:
        case (Tensor() as loss, int() as divisor) if loss.dim() == 0 and divisor >= 0:
            if torch.is_grad_enabled() and not loss.requires_grad:
                raise ScriptFaultError("has no gradient; compute it from the model's output")
            return loss, int(divisor)
    raise ScriptFaultError(
        "must return a tensor without dimensions, the sum over the samples, and a whole number,"
        f" what a mean divides by; it returned {_describe(found)}"
    )


def check_sum(
    both: tuple[float, int], first: tuple[float, int], second: tuple[float, int], *, loosely: bool
) -> None:
    """Check that the loss of four samples is the sum of those of their halves.

    What is not finite is found by the run.

    Args:
        loosely: refuse only a mean: batch norm makes samples depend on each other.
    """
    total, parts = both[0], first[0] + second[0]
    tolerance = _TOLERANCE * (abs(first[0]) + abs(second[0])) + 1e-6
    counts, is_sum = both[1] == first[1] + second[1], abs(total - parts) <= tolerance
    is_mean = not is_sum and abs(total - parts / 2) <= tolerance
    if not math.isfinite(total + parts) or (counts and (is_sum or (loosely and not is_mean))):
        return
    raise ScriptFaultError(
        f"{'is a mean' if is_mean else 'is not a sum over the samples'}: four samples have"
        f" {total:.6g} / {both[1]} together, {first[0]:.6g} / {first[1]} and {second[0]:.6g} /"
        f" {second[1]} in halves; return the sum, and what belongs together as one sample"
    )


def check_figures(found: Any) -> dict[str, float]:
    """Return what `metrics` returned, if it is a short mapping of names to finite numbers."""
    try:
        figures = {str(name): float(value) for name, value in found.items()}
        return TypeAdapter(Figures).validate_python(figures)
    except (AttributeError, TypeError, ValueError):
        raise ScriptFaultError(
            f"must return at most {MOST_FIGURES} names (small letters, digits and _) with finite"
            f" numbers, sums over the samples; it returned {_describe(found)}"
        ) from None


def read_versions(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return by name what changes with a trained parameter, by `.data` too, or its gradient."""
    return {
        name: (id(each), each._version, int(each.detach().view(torch.int32).sum()), id(each.grad))
        for name, each in model.named_parameters()
        if each.requires_grad
    }


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


def refuse_draws(model: nn.Module) -> None:
    """Refuse that random numbers were drawn: with other shares others would be."""
    names = (
        f"module {name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if module.training and getattr(module, "p", 0) and "Dropout" in type(module).__name__
    )
    raise ScriptFaultError(
        f"{next(names, 'loss or dataset')} draws random numbers, which would depend on how a step "
        "is divided; set its probability to 0 or the model to eval(), and draw what data needs"
        " from the sample's index"
    )


def _describe(value: Any) -> str:
    """Return a value in one short line."""
    return " ".join(repr(value).split())[:100]
