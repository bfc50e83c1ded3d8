"""Check every byte of a folder of shards, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trainer.system.errors import StorageError

if TYPE_CHECKING:
    from trainer.distill.logits.shard_folder import ShardFolder


@dataclass(frozen=True)
class ShardVerdict:
    """The result for one shard."""

    number: int
    name: str
    state: Literal["whole", "missing", "damaged"]
    reason: str | None = None


def verify_shards(folder: ShardFolder[Any, Any]) -> Iterator[ShardVerdict]:
    """Read every byte of every shard, one after the other.

    Raises:
        InputError: the folder has no usable dataset.json.
    """
    for plan in folder.plans:
        try:
            folder.plan_of(plan.number)  # of rounds: reads their answers
            if folder.is_there(plan.number):
                folder.verify_shard(plan.number)
                yield ShardVerdict(plan.number, plan.name, "whole")
            else:
                yield ShardVerdict(plan.number, plan.name, "missing")
        except StorageError as error:
            yield ShardVerdict(plan.number, plan.name, "damaged", str(error))
