"""Replica groups in a plan: several devices of a host are one worker."""

import json
from dataclasses import replace

import pytest

from launcher.inventory.facts.devices import Device
from launcher.plan.placement import place_run
from launcher.plan.plan import LaunchPlan
from tests.launcher.plan.places import LOCAL, SETTING, flag
from trainer.config.run import RunConfig, load_config
from trainer.system.untrusted_data import validate_data

RTX = Device("cuda", "GPU-4090", "RTX 4090", 24 << 30)


@pytest.fixture
def config() -> RunConfig:
    return load_config("quickstart", {"output": "/out"})


def test_a_replica_group_is_one_worker_with_members(config: RunConfig) -> None:
    pair = tuple(Device("cuda", f"GPU-{n}", group=0, strategy="ddp") for n in (1, 2))
    cores = (Device("cpu", "cpu", group=2, strategy="ddp"),) * 2
    host = replace(LOCAL, devices=(*pair, RTX, *cores))
    plan = place_run([host], config, None, SETTING)
    assert [(w.rank, w.local_rank, w.device, w.members, w.threads) for w in plan.workers] == [
        (0, 0, "GPU-1+GPU-2 (ddp)", ("GPU-1", "GPU-2"), None),
        (1, 1, "GPU-4090", (), None),
        (2, 2, "cpu+cpu (ddp)", ("cpu", "cpu"), 3),  # 8 cores, one for each GPU process
    ]
    assert flag(plan.leader.argv, "--expect-workers") == "3"
    first, _, last = (worker.argv for worker in plan.workers)
    assert (flag(first, "--gpus"), flag(first, "--strategy")) == ("GPU-1,GPU-2", "ddp")
    assert (flag(last, "--gpus"), flag(last, "--strategy")) == ("0,1", "ddp")
    assert "--strategy" not in plan.workers[1].argv
    assert plan.workers[1].devices == ("GPU-4090",)
    assert validate_data(LaunchPlan, json.loads(plan.to_json()), "plan") == plan
    assert len(place_run([host], config, 4, SETTING).workers) == 4  # one more on the CPU


@pytest.mark.parametrize(
    ("strategy", "expected"), [("ddp", 16 << 30), ("fsdp", 40 << 30), ("tensor", 40 << 30)]
)
def test_a_group_that_shares_its_model_has_the_memory_of_all_its_cards(
    config: RunConfig, strategy: str, expected: int
) -> None:
    cards = tuple(
        Device("cuda", name, memory=size << 30, group=0, strategy=strategy)
        for name, size in (("GPU-1", 24), ("GPU-2", 16))
    )
    plan = place_run([replace(LOCAL, devices=(*cards, RTX))], config, None, SETTING)
    assert [plan.device_memory(worker) for worker in plan.workers] == [expected, 24 << 30]
    assert plan.device_memory(plan.leader) is None
