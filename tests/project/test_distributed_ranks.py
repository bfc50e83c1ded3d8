"""The ranks for tests: results, failures and hangs come back as what they are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed_ranks import IDLE, RankError, Ranks, device_of
from tests.waiting import wait_for
from trainer.run.distributed.process_group import collectives

HERE = "tests.project.test_distributed_ranks"


def add_up(value: int) -> list[int]:
    total = torch.tensor(value + dist.get_rank())
    dist.all_reduce(total)
    return [dist.get_rank(), int(total)]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says so")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def number_and_group() -> list[bool | int]:
    return [os.getpid(), dist.is_initialized()]


def test_every_rank_returns_its_result(ranks: Ranks) -> None:
    assert ranks.run(f"{HERE}:add_up", 10) == [[0, 21], [1, 21]]
    assert ranks.run(f"{HERE}:add_up", 1, world=4) == [[rank, 10] for rank in range(4)]


def test_a_world_of_none_is_a_process_without_a_group_for_one_call(ranks: Ranks) -> None:
    found = [ranks.run(f"{HERE}:number_and_group", world=0) for _ in range(2)]
    ((first, grouped),), ((second, grouped_too),) = found
    assert first != second
    assert not grouped
    assert not grouped_too


def test_a_failing_rank_and_a_hanging_one_are_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 says so"):
        ranks.run(f"{HERE}:fail_on", 1)
    ranks.run(f"{HERE}:add_up", 0)  # new ranks: their start is not part of the patience
    with pytest.raises(RankError, match=r"rank 1 hangs:[^$]*in hang_on"):
        ranks.run(f"{HERE}:hang_on", 1, patience=10.0)
    assert ranks.run(f"{HERE}:add_up", 0) == [[0, 1], [1, 1]]


def test_ranks_without_work_end(ranks: Ranks) -> None:
    found = ranks.run(f"{HERE}:number_and_group")
    time.sleep(IDLE)
    running = [Path("/proc", str(pid)) for pid, _ in found]
    wait_for(lambda: not any(process.exists() for process in running), "the end of the ranks")
    assert ranks.run(f"{HERE}:add_up", 0) == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("world", "gpus", "devices", "engines"),
    [
        (2, 0, ["cpu", "cpu"], "gloo"),
        (2, 2, ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl"),
        (4, 2, ["cpu"] * 4, "gloo"),  # two ranks of NCCL cannot share a GPU
    ],
)
def test_ranks_take_gpus_where_there_is_one_each(
    world: int, gpus: int, devices: list[str], engines: str
) -> None:
    found = [device_of(rank, world, gpus) for rank in range(world)]
    assert found == devices
    assert {collectives(torch.device(device)) for device in found} == {engines}
