"""How long a run takes to recover from each fault. Pure: figures from a timeline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.soak.faults import Injection
from tests.soak.schedule import COORDINATOR, KINDS, WORKERS, Fault
from tests.soak.timeline import Membership, Timeline, apply

_NOTICED_WITHIN = {"lost": 5.0, "listening": 30.0}
"""Seconds after the end of a fault in which such an event of its target counts as its doing."""
_EVERYBODY = set(range(len(WORKERS)))


@dataclass(frozen=True)
class Recovery:
    """What followed a fault; seconds after it was injected."""

    injection: Injection
    step: float | None
    """Until a step that began after it was committed; None: there was none any more."""
    full: float | None
    """Until all workers were members again; None when no member was lost by it."""
    lost: bool
    """Whether a member was lost by it."""


def recoveries(injections: Sequence[Injection], timeline: Timeline) -> list[Recovery]:
    """Return what followed each fault that really happened."""
    happened = [injection for injection in injections if not injection.missed]
    losses: dict[int, float] = {}
    for change in timeline.members:
        if (cause := _cause(change, happened)) is not None:
            losses.setdefault(cause, change.at)
    return [
        _recovery(injection, losses.get(index), timeline)
        for index, injection in enumerate(happened)
    ]


def _recovery(injection: Injection, lost_at: float | None, timeline: Timeline) -> Recovery:
    # The first commit after it may be of the step that was under way, and all but done.
    second = bisect_right(timeline.commits, injection.began) + 1
    commits = timeline.commits[second : second + 1]
    step = commits[0] - injection.began if commits else None
    if lost_at is None:
        return Recovery(injection, step, None, False)
    full_at = _full_at(max(lost_at, injection.healed), timeline.members)
    return Recovery(injection, step, None if full_at is None else full_at - injection.began, True)


def _cause(change: Membership, injections: Sequence[Injection]) -> int | None:
    """Return which fault cost a member: the latest of those that concern it."""
    for index in reversed(range(len(injections))):
        injection = injections[index]
        in_time = change.at - injection.healed <= _NOTICED_WITHIN.get(change.event, -math.inf)
        if injection.began < change.at and in_time and _concerns(injection.fault, change):
            return index
    return None


def _concerns(fault: Fault, change: Membership) -> bool:
    if fault.target == COORDINATOR:
        return change.rank is not None or KINDS[fault.kind].kills
    return change.rank is not None and fault.target == WORKERS[change.rank]


def _full_at(since: float, members: Sequence[Membership]) -> float | None:
    """Return the first time from `since` on at which all workers are members."""
    present: set[int] = set()
    for index, change in enumerate(members):
        apply(present, change)
        following = members[index + 1].at if index + 1 < len(members) else math.inf
        if present == _EVERYBODY and following > since:
            return max(since, change.at)
    return None


def summary(found: Sequence[Recovery]) -> dict[str, dict[str, Any]]:
    """Return for each kind how many there were, and p50, p95 and maximum of both times."""
    kinds: dict[str, list[Recovery]] = defaultdict(list)
    for recovery in found:
        kinds[recovery.injection.fault.kind].append(recovery)
    return {
        kind: {
            "faults": len(those),
            "lost": sum(recovery.lost for recovery in those),
            "step": quantiles([r.step for r in those if r.step is not None]),
            "full": quantiles([r.full for r in those if r.full is not None]),
        }
        for kind, those in sorted(kinds.items())
    }


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50, p95 and the maximum of some seconds; None without any."""
    if not values:
        return None
    ordered = sorted(values)
    named = {"p50": 0.5, "p95": 0.95, "max": 1.0}
    return {
        name: round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 3)
        for name, share in named.items()
    }
