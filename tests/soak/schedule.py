"""Which fault comes when, drawn from a seed. Pure: the same arguments give the same schedule."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

COORDINATOR = "coordinator"
WORKERS = ("worker-0", "worker-1", "worker-2")
DISK = "disk"

REST = 12.0
"""Seconds after a kill in which the same process is left alone: it could not be found in time."""
CALM = 0.75
"""Share of the time after which nothing is killed, so that leaks show in processes that stay."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    weight: int
    """How often it comes, relative to the others. A kill of a supervisor costs seconds of CPU, a
    cut next to none: the weights keep two cores busy with training most of the time."""
    targets: tuple[str, ...]
    touches: str
    """What two faults must not change at once: a process, its link, its clock, or the disk."""
    seconds: tuple[float, float] = (0.0, 0.0)
    amounts: tuple[float, ...] = ()
    """Values that one is drawn from; what it means is the fault's own business."""

    @property
    def kills(self) -> bool:
        """Whether a process ends by it."""
        return self.touches == "process" and self.seconds == (0.0, 0.0)


KINDS: dict[str, Kind] = {
    "cut": Kind(22, WORKERS, "link"),
    "silence": Kind(12, WORKERS, "link", (0.3, 5.0)),
    "slow link": Kind(10, WORKERS, "link", (2.0, 8.0), (50e3, 200e3, 800e3)),
    "stop worker": Kind(12, WORKERS, "process", (0.3, 5.0)),
    "stop coordinator": Kind(5, (COORDINATOR,), "process", (0.3, 3.5)),
    "stall": Kind(12, WORKERS, "process", (2.0, 8.0), (0.05, 0.2)),
    "kill worker": Kind(10, WORKERS, "process"),
    "kill coordinator": Kind(5, (COORDINATOR,), "process"),
    "kill supervisor": Kind(3, (COORDINATOR, *WORKERS), "process"),
    "full disk": Kind(4, (DISK,), "disk", (1.0, 6.0)),
    "clock jump": Kind(
        5, (COORDINATOR, *WORKERS), "clock", (2.0, 6.0), (-7200, -1800, 3600, 86400)
    ),
}
"""`silence` lets nothing pass and tells neither side; a `stall` leaves a worker a share `amount` of
its time; a `slow link` passes `amount` bytes a second; a `clock jump` is of `amount` seconds, and
the connections of that host are made again under the wrong time."""


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule."""

    at: float
    """Seconds after the start."""
    kind: str
    target: str
    seconds: float
    """How long it lasts; 0 for one that happens at once."""
    amount: float = 0.0

    @property
    def touches(self) -> str:
        """The one thing that it changes."""
        return f"{KINDS[self.kind].touches} of {self.target}"


def draw(seed: int, seconds: float, count: int, without: Collection[str] = ()) -> list[Fault]:
    """Return `count` faults in the order of time; the kinds of `without` are left out.

    Each kind comes at least once if there are faults enough. No two touch the same thing at once.
    """
    kinds = {name: kind for name, kind in KINDS.items() if name not in without}
    gentle = {name: kind for name, kind in kinds.items() if not kind.kills}
    generator = random.Random(f"soak {seed}")
    early = round(count * CALM)
    names = [*kinds, *_names(generator, kinds, max(0, early - len(kinds)))][:early]
    generator.shuffle(names)
    names += _names(generator, gentle, count - early)
    names += gentle  # a reserve, for the moment in which nothing that is left has a free target
    busy: dict[str, float] = {}
    return [
        _next_fault(
            round((index + generator.random()) * seconds / count, 3), names, busy, generator
        )
        for index in range(count)
    ]


def _names(generator: random.Random, kinds: dict[str, Kind], count: int) -> list[str]:
    return generator.choices(list(kinds), [kind.weight for kind in kinds.values()], k=count)


def _next_fault(at: float, names: list[str], busy: dict[str, float], draw: random.Random) -> Fault:
    """Take the first name whose kind has a target that nothing disturbs at that time."""
    for position, name in enumerate(names):
        kind = KINDS[name]
        free = [t for t in kind.targets if busy.get(f"{kind.touches} of {t}", 0.0) <= at]
        if free:
            del names[position]
            seconds = round(draw.uniform(*kind.seconds), 3)
            amount = float(draw.choice(kind.amounts)) if kind.amounts else 0.0
            fault = Fault(at, name, draw.choice(free), seconds, amount)
            busy[fault.touches] = at + (REST if kind.kills else seconds + 0.5)
            return fault
    raise ValueError(f"at {at:.0f} s everything is disturbed already: fewer faults, or more time")
