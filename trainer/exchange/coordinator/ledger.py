"""The ledger of shards by block, which makes every sample count exactly once.

A task (one training step or one evaluation) assigns its samples as shards. For every column
(one per gradient block, and one for the results) each sample must be covered exactly once,
also when a shard is reassigned because its worker was lost (F-DP-002). Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Shard:
    """Samples `start..stop` of a task, assigned to one rank."""

    id: int
    rank: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of samples."""
        return self.stop - self.start


@dataclass
class _Entry:
    shard: Shard
    parent: _Entry | None = None
    children: list[_Entry] = field(default_factory=list["_Entry"])
    recorded: set[int] = field(default_factory=set[int])

    def covers_column(self, column: int) -> bool:
        if column in self.recorded:
            return True
        return bool(self.children) and all(child.covers_column(column) for child in self.children)

    def iterate_counted(self, column: int) -> Iterator[Shard]:
        if column in self.recorded:
            yield self.shard
        else:
            for child in self.children:
                yield from child.iterate_counted(column)


class Ledger:
    """The ledger of one task; `columns` is the number of columns."""

    def __init__(self, columns: int, shards: Sequence[Shard]) -> None:
        self.columns = columns
        self._roots = [_Entry(shard) for shard in sorted(shards, key=lambda shard: shard.start)]
        self._entries = {entry.shard.id: entry for entry in self._roots}
        assert _are_contiguous(self._roots), "shards must follow each other"
        self._first = {entry.shard.id: entry.shard for entry in self._roots}
        self._covered = Counter[int]()
        """For each column the shards of the beginning whose samples are all in it."""
        self._led = Counter[int]()
        """For each column those of them before the first whose samples are not."""
        self._leading = defaultdict[int, list[Shard]](list)
        """For each column the shards that make these up."""

    @property
    def initial_shards(self) -> list[Shard]:
        """The shards that the task began with, in the order of their samples."""
        return [root.shard for root in self._roots]

    @property
    def num_samples(self) -> int:
        """The number of the task's samples."""
        return self._roots[-1].shard.stop - self._roots[0].shard.start

    def is_first(self, shard: Shard) -> bool:
        """Return whether the task began with a shard, cut or not."""
        return shard.id in self._first

    def is_whole(self, shard: Shard) -> bool:
        """Return whether the task began with a shard as it is."""
        return self._first.get(shard.id) == shard

    def replace_shard(self, shard_id: int, replacements: Sequence[Shard]) -> None:
        """Replace a shard by others in every column where its contribution is missing."""
        entry = self._entries[shard_id]
        assert not entry.children, f"shard {shard_id} is already reassigned"
        children = [_Entry(shard, entry) for shard in sorted(replacements, key=lambda s: s.start)]
        assert _are_contiguous(children)
        assert children[0].shard.start == entry.shard.start
        assert children[-1].shard.stop == entry.shard.stop
        entry.children = children
        self._entries.update((child.shard.id, child) for child in children)

    def find_shard(self, shard_id: int) -> Shard | None:
        """Return a shard of this task by its id, None if there is none."""
        entry = self._entries.get(shard_id)
        return entry.shard if entry else None

    def needs_contribution(self, shard_id: int, column: int) -> bool:
        """Return whether a contribution of the shard to the column would count."""
        entry: _Entry | None = self._entries[shard_id]
        if column in entry.recorded or entry.children:
            return False
        while (entry := entry.parent) is not None:
            if column in entry.recorded:
                return False
        return True

    def find_missing(self, shard_id: int) -> tuple[int, ...]:
        """Return the columns to which the shard still has to contribute."""
        return tuple(
            column for column in range(self.columns) if self.needs_contribution(shard_id, column)
        )

    def record_contribution(self, shard_id: int, column: int) -> None:
        """Record that the shard's whole contribution to the column was received."""
        assert self.needs_contribution(shard_id, column), (
            f"shard {shard_id} counts twice in column {column}"
        )
        entry = self._entries[shard_id]
        entry.recorded.add(column)
        while entry.parent is not None:
            entry = entry.parent
        self._covered[column] += entry.covers_column(column)

    def is_complete(self, column: int) -> bool:
        """Return whether every sample is in the column."""
        return self._covered[column] == len(self._roots)

    def list_counted(self, column: int) -> list[Shard]:
        """Return the shards that make up a column, in the order of their samples."""
        return [shard for root in self._roots for shard in root.iterate_counted(column)]

    def list_leading(self, column: int) -> list[Shard]:
        """Return the shards that make up a column up to its first missing sample, in their order.

        What is recorded stays, and a reassigned shard keeps its samples, so these can only become
        more.
        """
        whole, roots = self._leading[column], self._roots
        while self._led[column] < len(roots) and roots[self._led[column]].covers_column(column):
            whole += roots[self._led[column]].iterate_counted(column)
            self._led[column] += 1
        found = list(whole)
        if self._led[column] < len(roots):
            cut = roots[self._led[column]]
            stop = cut.shard.start
            for shard in cut.iterate_counted(column):
                if shard.start != stop:
                    break
                found.append(shard)
                stop = shard.stop
        return found

    def list_open(self, rank: int) -> list[Shard]:
        """Return the rank's shards of which a contribution is missing."""
        return [
            entry.shard
            for entry in self._entries.values()
            if entry.shard.rank == rank and self.find_missing(entry.shard.id)
        ]


def _are_contiguous(entries: Sequence[_Entry]) -> bool:
    return bool(entries) and all(
        left.shard.stop == right.shard.start for left, right in pairwise(entries)
    )
