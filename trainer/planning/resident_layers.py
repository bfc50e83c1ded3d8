"""How many layers of a frozen base stay in memory; the others are read at each use."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

Planned = TypeVar("Planned")
HEAD_STREAMED = -1
"""A number of resident layers below 0: none stays, and a language model's head does not, either."""
_RESIDENTS = re.compile(r"\d+ of \d+ layers resident, \d+ streamed(?: with the head)?")


def describe_residents(resident: int, layers: int) -> str:
    """Return how many layers of a frozen base stay in memory, in words."""
    head = " with the head" if resident == HEAD_STREAMED else ""
    resident = max(0, resident)
    return f"{resident} of {layers} layers resident, {layers - resident} streamed{head}"


def resolve_resident(asked: int | str, layers: int, chosen: int | None) -> int | None:
    """Return how many layers stay in memory; None: all.

    Args:
        asked: `model.resident`; `auto` leaves it at all.
        chosen: number that takes its place.
    """
    if chosen is None and isinstance(asked, int) and asked < layers:
        return asked
    return chosen


def streamed_layers(layers: int, resident: int | None) -> frozenset[int]:
    """Return the layers that are read at each use.

    Those that stay lie evenly between them: each gives the next read its time.
    """
    kept = layers if resident is None else max(0, min(resident, layers))
    return frozenset(
        number
        for number in range(layers)
        if (number + 1) * kept // layers == number * kept // layers
    )


def choose_resident(
    plan: Callable[[int | None], Planned], layers: int, fits: Callable[[Planned], bool]
) -> Planned:
    """Return the plan with as many resident layers as fit, all of them if they do.

    If nothing fits, it is the plan with none.

    Args:
        plan: returns that of a number of resident layers; None: all.
    """
    whole = plan(None)
    if fits(whole):
        return whole
    # Each layer that stays takes memory, so those that fit come first.
    fitting = bisect.bisect_left(range(layers), True, key=lambda count: not fits(plan(count)))
    return plan(max(0, fitting - 1))


def stream_head(
    found: Planned,
    plan: Callable[[int], Planned],
    size: Callable[[Planned], float],
    usable: float,
) -> Planned:
    """Return a plan without resident layers, or if it does not fit the one that reads the head.

    A head is read for each chunk of logits, so that no layer stays before the head does.

    Args:
        size: returns the bytes of a plan.
        usable: bytes of the device that it may fill.
    """
    if size(found) <= usable:
        return found
    return min(found, plan(HEAD_STREAMED), key=size)


def choose_group(
    plan: Callable[[int, int | None], Planned],
    layers: int,
    most: int,
    fits: Callable[[int, Planned], bool],
    resident_of: Callable[[Planned], int | None],
    *,
    others: int = 0,
) -> Planned:
    """Return the plan with which the micro-batches of a step read least.

    A group of them reads each layer once, and takes memory in which layers could stay.

    Args:
        plan: as for `choose_resident`, of a number of micro-batches in a group.
        most: micro-batches of a group.
        others: passes besides, such as those of new tokens after the chunks of prompts.
    """
    tried: list[tuple[int, Planned]] = []
    for micros in (most >> halvings for halvings in range(most.bit_length())):
        found = choose_resident(partial(plan, micros), layers, partial(fits, micros))
        resident = resident_of(found)
        passes = -(-most // micros) + others
        reads = passes * (layers - (layers if resident is None else resident))
        if micros == 1 or fits(micros, found):
            tried.append((reads, found))
    return min(tried, key=lambda one: one[0])[1]


def list_residents(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each worker that reads layers at each use, by rank.

    Args:
        workers: their `rank`, `device` and `backend_reason`.
    """
    found = {
        worker.get("rank"): f"worker {worker.get('rank')} on {worker.get('device')}: {residents}"
        for worker in workers
        if (residents := find_residents(str(worker.get("backend_reason"))))
    }
    return [found[rank] for rank in sorted(found, key=str)]


def find_residents(text: str) -> str:
    """Return what `describe_residents` said in a text; empty if it did not."""
    found = _RESIDENTS.search(text)
    return found[0] if found else ""
