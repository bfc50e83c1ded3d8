"""The ranks for tests: results, failures and hangs come back as what they are."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed_ranks import RankError, Ranks, device_of
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


def grouped() -> bool:
    return dist.is_initialized()


def test_every_rank_returns_its_result(ranks: Ranks) -> None:
    assert ranks.run(f"{HERE}:add_up", 10) == [[0, 21], [1, 21]]
    assert ranks.run(f"{HERE}:add_up", 1, world=4) == [[rank, 10] for rank in range(4)]


def test_a_world_of_none_is_a_process_without_a_group(ranks: Ranks) -> None:
    assert ranks.run(f"{HERE}:grouped", world=0) == [False]


def test_a_failing_rank_and_a_hanging_one_are_named(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="ValueError: rank 1 says so"):
        ranks.run(f"{HERE}:fail_on", 1)
    with pytest.raises(RankError, match=r"rank 1 ended[^$]*in hang_on"):
        ranks.run(f"{HERE}:hang_on", 1, patience=20.0)


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
