"""The ranks for tests: results, failures and hangs come back as what they are."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed_ranks import RankError, Ranks, device_of
from trainer.run.distributed.process_group import choose_collectives

HERE = "tests.project.test_distributed_ranks"


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says so")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.cluster
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
    assert {choose_collectives(torch.device(device)) for device in found} == {engines}
