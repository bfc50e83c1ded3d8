"""Decide which layers of a frozen base stay in memory: as it was asked for, or by memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from trainer.config.run import Resident
from trainer.planning.model_config import read_shape
from trainer.planning.resident_layers import HEAD_STREAMED, stream_head

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
    *,
    size: Callable[[_Plan], int],
    usable: float,
) -> _Plan:
    """Return the plan with the layers that are asked to stay, and log how many do.

    Args:
        plan: returns that of a number of resident layers; None: all.
        choose: returns the plan of so many layers where `auto` is asked.
        size: returns the bytes of a plan.
        usable: bytes of the device that it may fill.
    """
    layers = read_shape(model_dir).layers
    if isinstance(asked, int):
        found = plan(asked if asked < layers else None)
    elif asked == "all":
        found = plan(None)
    else:
        found = choose(layers)
    if found.resident == 0:
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
