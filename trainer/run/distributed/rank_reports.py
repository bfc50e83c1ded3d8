"""Before the first collective, every rank publishes its facts and compares the others'.

It uses the rendezvous store, so a rank that is missing, or has different weights, is named within a
deadline instead of hanging or corrupting the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store

from trainer.run.distributed.rank_notes import read_note
from trainer.run.distributed.rendezvous import COUNT, end_reading_ranks
from trainer.system.errors import (
    InputError,
    InUseError,
    RefusedError,
    StorageError,
    TrainerError,
    UnreachableError,
)

_Found = TypeVar("_Found")
_KINDS = {kind.exit_code: kind for kind in (InUseError, InputError, RefusedError, StorageError)}
_PREPARED = "prepared"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.002, 0.25


@dataclass(frozen=True)
class RankReport:
    """The published facts of a rank."""

    rank: int
    host: str
    device: str
    facts: dict[str, str]
    """Values that all ranks must have in common, by names for people."""


@dataclass(frozen=True)
class _Prepared:
    """The files that rank 0 found, or why it did not."""

    reply: Any = None
    error: str | None = None
    code: int = TrainerError.exit_code


def gather_rank_reports(
    store: Store, me: RankReport, world_size: int, patience: float
) -> list[RankReport]:
    """Return all members by rank.

    Args:
        patience: seconds in which no rank reads any of its data.

    Raises:
        UnreachableError: ranks are missing.
        RefusedError: a rank has something else than rank 0.
    """
    store.set(f"member-{me.rank}", json.dumps(asdict(me)))
    keys = [f"member-{rank}" for rank in range(world_size)]
    _await_members(store, keys, me.rank, patience)
    members = [read_note(RankReport, store.get(key), key) for key in keys]
    _all_have_read(store, "roll", me.rank, world_size, patience)
    for other in members[1:]:
        for what, value in members[0].facts.items():
            if other.facts.get(what) != value:
                raise RefusedError(
                    f"rank {other.rank} on {other.host}: its {what} differs from that of rank 0 on"
                    f" {members[0].host}: {other.facts.get(what)}, not {value}; give all ranks the"
                    " same"
                )
    return members


def _await_members(store: Store, keys: list[str], rank: int, patience: float) -> None:
    """Wait for all ranks, for as long as any that is missing reads its data."""
    count, moved, pause = store.add(COUNT, 0), time.monotonic(), _FIRST_PAUSE
    while not store.check(keys):
        if (counted := store.add(COUNT, 0)) > count:
            count, moved = counted, time.monotonic()
        if time.monotonic() - moved >= patience:
            missing = [number for number, key in enumerate(keys) if not store.check([key])]
            reason = (
                f"rank {rank} waited {patience:.0f} s for {_name_ranks(missing)} of {len(keys)}:"
                " start the missing ranks, and check their logs"
            )
            raise UnreachableError(end_reading_ranks(store, missing, reason))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def prepare_on_first_rank(
    store: Store,
    rank: int,
    world_size: int,
    patience: float,
    prepare: Callable[[], _Found],
    tell: Callable[[_Found], Any],
) -> tuple[_Found | None, Any]:
    """Return what `prepare` returns on rank 0, None elsewhere, and what it tells all ranks.

    Args:
        tell: makes of it what JSON can carry.

    Raises:
        TrainerError: rank 0's, on every rank.
    """
    if rank == 0:
        try:
            found = prepare()
        except TrainerError as error:
            store.set(_PREPARED, json.dumps({"error": str(error), "code": error.exit_code}))
            _all_have_read(store, _PREPARED, rank, world_size, patience)
            raise
        reply = tell(found)
        store.set(_PREPARED, json.dumps({"reply": reply}))
        return found, reply
    answer = read_note(_Prepared, store.get(_PREPARED), _PREPARED)
    if answer.error is None:
        return None, answer.reply
    _all_have_read(store, _PREPARED, rank, world_size, patience)
    raise _KINDS.get(answer.code, TrainerError)(f"rank 0: {answer.error}")


def _all_have_read(store: Store, what: str, rank: int, world_size: int, patience: float) -> None:
    """Keep rank 0, with which the store ends, until all ranks have come this far."""
    if store.add(f"{what}-readers", 1) == world_size:
        store.set(f"{what}-was-read", "")
    if rank == 0:
        with suppress(RuntimeError):
            store.wait([f"{what}-was-read"], timedelta(seconds=patience))


def _name_ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
