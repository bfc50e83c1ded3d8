"""The ledger against a naive book: F-DP-002 for every order of contributions and losses."""

from __future__ import annotations

from itertools import pairwise, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trainer.exchange.coordinator.ledger import Ledger, Shard


class LedgerAgainstSets(RuleBasedStateMachine):
    """The naive book: per column, how often each sample was counted."""

    @initialize(
        sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4), columns=st.integers(1, 4)
    )
    def deal(self, sizes: list[int], columns: int) -> None:
        self.start = 100
        self.shards: dict[int, Shard] = {}
        shards: list[Shard] = []
        position = self.start
        for size in sizes:
            shards.append(self._new(len(shards), position, position + size))
            position += size
        self.stop = position
        self.open = {shard.id for shard in shards}
        self.counts = [dict.fromkeys(range(self.start, self.stop), 0) for _ in range(columns)]
        self.recorded: set[tuple[int, int]] = set()
        self.led: list[list[Shard]] = [[] for _ in range(columns)]
        self.ledger = Ledger(columns, list(reversed(shards)))
        assert self.ledger.initial_shards == shards

    def _new(self, rank: int, start: int, stop: int) -> Shard:
        shard = Shard(len(self.shards), rank, start, stop)
        self.shards[shard.id] = shard
        return shard

    def _wanted(self, shard: Shard, column: int) -> bool:
        """Say it by the naive book: nobody took over, and none of its samples is counted."""
        counts = self.counts[column]
        taken = any(counts[position] for position in range(shard.start, shard.stop))
        return shard.id in self.open and not taken

    @rule(data=st.data())
    def contribute(self, data: st.DataObject) -> None:
        shard = self.shards[data.draw(st.sampled_from(sorted(self.shards)))]
        column = data.draw(st.integers(0, len(self.counts) - 1))
        wanted = self._wanted(shard, column)
        assert self.ledger.needs_contribution(shard.id, column) == wanted
        if wanted:
            self.ledger.record_contribution(shard.id, column)
            self.recorded.add((shard.id, column))
            for position in range(shard.start, shard.stop):
                self.counts[column][position] += 1
        else:
            with pytest.raises(AssertionError):
                self.ledger.record_contribution(shard.id, column)

    @rule(data=st.data())
    def lose_and_deal_again(self, data: st.DataObject) -> None:
        if not self.open:
            return
        shard = self.shards[data.draw(st.sampled_from(sorted(self.open)))]
        cuts = data.draw(
            st.sets(st.integers(shard.start + 1, shard.stop - 1))
            if shard.size > 1
            else st.just(set[int]())
        )
        edges = [shard.start, *sorted(cuts), shard.stop]
        pieces = [
            self._new(data.draw(st.integers(0, 3)), start, stop) for start, stop in pairwise(edges)
        ]
        self.ledger.replace_shard(shard.id, list(reversed(pieces)))
        self.open.remove(shard.id)
        self.open |= {piece.id for piece in pieces}

    @invariant()
    def every_sample_counts_at_most_once(self) -> None:
        for column, counts in enumerate(self.counts):
            assert set(counts.values()) <= {0, 1}
            assert self.ledger.is_complete(column) == all(counts.values())

    @invariant()
    def what_counts_partitions_what_is_covered(self) -> None:
        for column, counts in enumerate(self.counts):
            counting = self.ledger.list_counted(column)
            covered = [p for shard in counting for p in range(shard.start, shard.stop)]
            assert covered == sorted(p for p, count in counts.items() if count)
            assert {(shard.id, column) for shard in counting} <= self.recorded

    @invariant()
    def what_leads_stays_and_grows(self) -> None:
        for column, counts in enumerate(self.counts):
            leading = self.ledger.list_leading(column)
            led = [p for shard in leading for p in range(shard.start, shard.stop)]
            assert led == [*takewhile(lambda p, counts=counts: counts[p], counts)]
            assert leading[: len(self.led[column])] == self.led[column]
            self.led[column] = leading

    @invariant()
    def open_work_is_exactly_what_is_missing(self) -> None:
        owed = [dict.fromkeys(range(self.start, self.stop), 0) for _ in self.counts]
        for shard in self.shards.values():
            missing = self.ledger.find_missing(shard.id)
            assert missing == tuple(
                column for column in range(len(self.counts)) if self._wanted(shard, column)
            )
            assert (shard in self.ledger.list_open(shard.rank)) == bool(missing)
            for column in missing:
                for position in range(shard.start, shard.stop):
                    owed[column][position] += 1
        for counts, debts in zip(self.counts, owed, strict=True):
            assert all(counts[p] + debts[p] == 1 for p in counts), "lost, or asked for twice"


LedgerAgainstSets.TestCase.settings = settings(
    max_examples=100, stateful_step_count=25, derandomize=True
)
TestLedgerAgainstSets = LedgerAgainstSets.TestCase


def test_unknown_shards_have_no_owner():
    assert Ledger(1, [Shard(0, 0, 0, 4)]).find_shard(7) is None


@pytest.mark.parametrize(
    "shards",
    [[], [Shard(0, 0, 0, 4), Shard(1, 1, 5, 8)], [Shard(0, 0, 0, 4), Shard(1, 1, 3, 8)]],
    ids=["none", "gap", "overlap"],
)
def test_shards_must_follow_each_other(shards: list[Shard]):
    with pytest.raises(AssertionError):
        Ledger(1, shards)


@pytest.mark.parametrize("pieces", [[(0, 2)], [(1, 4)], [(0, 2), (3, 4)], [(0, 5)]])
def test_replacements_must_be_the_whole_shard(pieces: list[tuple[int, int]]):
    ledger = Ledger(1, [Shard(0, 0, 0, 4)])
    with pytest.raises(AssertionError):
        ledger.replace_shard(
            0, [Shard(9 + i, 1, start, stop) for i, (start, stop) in enumerate(pieces)]
        )
