"""Sums that were begun before all has come, when a worker is killed after what it has uploaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from tests.trainer.exchange.lossy_cluster import LossyCluster, LossyProblem
from tests.trainer.exchange.staging import assign, begun, compute, open_round, redealt, until_step
from trainer.exchange.coordinator.gradient_sum import Average, Contribution, GradientSum
from trainer.exchange.coordinator.ledger import Shard
from trainer.exchange.policies.feedback import make_sender_codec
from trainer.exchange.protocol.wire import Frame

pytestmark = pytest.mark.usefixtures("small_frames")

WORKERS = 6
"""Of fewer than five, int8's contributions take less than their sum in fp32, and wait."""


class Watched(NamedTuple):
    """What a step's sum took in, and what it made of it."""

    taken: dict[tuple[int, int], tuple[np.ndarray, int]]
    """Decoded contributions and their weights, by block and shard."""
    orders: dict[int, list[int]]
    """The shards of each block, in the order of their samples."""
    averages: dict[int, bytes]
    begun: dict[int, int]
    """How many contributions each block's sum had when the last one came."""

    def average_in_one_go(self, block: int) -> bytes:
        """Return a block's average as NumPy makes it of all contributions, one after another."""
        parts = [self.taken[block, shard] for shard in self.orders[block]]
        total = np.zeros(parts[0][0].size, np.float32)
        for values, _ in parts:
            total += values
        total /= np.float32(sum(weight for _, weight in parts))
        return make_sender_codec("int8", problem().layout).encode(block, total)[1].tobytes()


def problem() -> LossyProblem:
    return LossyProblem(
        samples=36,
        method="full",
        exchange__codec="int8",
        checkpoint__every=3,
        training__batch_size=18,
    )


def watch(sums: GradientSum) -> Watched:
    found = Watched({}, {}, {}, {})
    add, average = sums.add_frame, sums.average_block

    def added(frame: Frame) -> Contribution | None:
        whole = add(frame)
        if whole:
            found.taken[frame.block, frame.shard] = whole.decode().copy(), whole.weight
        return whole

    def averaged(block: int, order: Sequence[Shard]) -> Average:
        found.begun[block] = sums._begun.get(block, (0, 0))[0]
        found.orders[block] = [shard.id for shard in order]
        made = average(block, order)
        found.averages[block] = made.encoded.tobytes()
        return made

    # Wrapped on the instance: the coordinator makes its own sums.
    sums.add_frame, sums.average_block = added, averaged
    return found


@pytest.mark.parametrize("blocks", [*range(4), None], ids=str)
@pytest.mark.parametrize("victim", range(WORKERS))
def test_they_have_the_bits_of_a_sum_in_one_go(victim: int, blocks: int | None) -> None:
    cluster = begun(LossyCluster(problem(), WORKERS))
    assign(cluster)
    sums = open_round(cluster).sums
    assert sums is not None
    watched = watch(sums)
    killed = cluster.workers[victim]
    late = cluster.workers[5 if victim < 5 else 4]
    for worker in (each for each in cluster.workers if each not in (killed, late)):
        compute(worker)
        cluster.deliver_up(worker)
    compute(killed, blocks)
    cluster.kill(killed, delivered=None)
    assert bool(redealt(cluster)) == (blocks is not None)

    cluster.settle_down()

    assert cluster.step >= 1
    assert watched.averages.keys() == set(range(len(problem().layout.blocks)))
    for block, encoded in watched.averages.items():
        assert encoded == watched.average_in_one_go(block)
    if victim >= 4:  # else what has its turn first is missing until the others take it over
        assert min(watched.begun.values()) >= 4, watched.begun
    if blocks is None:
        assert cluster.problem.trajectory[1] == undisturbed()
    cluster.run_to_end()


def undisturbed() -> bytes:
    """Return the weights after a first step that nothing happens to."""
    cluster = LossyCluster(problem(), WORKERS)
    until_step(cluster, 1)
    return cluster.problem.trajectory[1]
